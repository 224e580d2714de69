"""Grammars of answers that may contain tool calls, as structural tags. Tool parsers supply the formats."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec

from ..interfaces.parser import CallTags
from ..interfaces.sampling import StructuredOutputsParams

Format = dict[str, Any]


def text_or_calls(constraint: StructuredOutputsParams, calls: CallTags, parallel: bool) -> StructuredOutputsParams:
    """Answers that obey `constraint` or call tools; a structural tag of the older form stays as it is."""
    text = _text_format(constraint)
    if text is None:
        return constraint
    # a lexer takes the longest literal that matches: where other JSON is allowed too, the head of a call must be given
    # in JSON's tokens, not as one literal
    calls = replace(calls, tags=[_as_object(tag) or tag for tag in calls.tags])
    return _tagged({"type": "or", "elements": [text, _calls_format(calls, parallel)]}, constraint)


def only_calls(calls: CallTags, parallel: bool) -> StructuredOutputsParams | None:
    """Answers that are calls; None for formats whose arguments are not JSON, in which no schema can be enforced."""
    contents = [tag["content"].get("elements", [tag["content"]])[-1] for tag in calls.tags]
    if any(content["type"] != "json_schema" for content in contents):
        return None
    return _tagged(_calls_format(calls, parallel), StructuredOutputsParams())


def text_with_calls(calls: CallTags, parallel: bool) -> StructuredOutputsParams:
    """Free text in which every tool call that begins must also be complete."""
    tags = calls.tags
    if calls.opener:
        tags = [{"type": "tag", "begin": calls.opener, "content": _several(calls, parallel), "end": calls.closer}]
    return _tagged({"type": "triggered_tags", "triggers": [calls.trigger], "tags": tags}, StructuredOutputsParams())


def _tagged(form: Format, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
    tag = json.dumps({"type": "structural_tag", "format": form})
    return msgspec.structs.replace(
        constraint, json=None, json_object=None, regex=None, choice=None, grammar=None, structural_tag=tag
    )


def _calls_format(calls: CallTags, parallel: bool) -> Format:
    ends = [{"type": "const_string", "value": text} for text in (calls.opener, calls.closer)]
    inner = [ends[0], _several(calls, parallel), ends[1]]
    return {"type": "sequence", "elements": [part for part in inner if part.get("value", True)]}


def _as_object(tag: Mapping[str, Any]) -> Format | None:
    """The JSON schema of a call that is written as one JSON object; None for other formats."""
    content = tag["content"]
    try:
        call = json.loads(f"{tag['begin']}null{tag['end']}")
    except ValueError:
        return None
    if content["type"] != "json_schema" or not isinstance(call, dict):
        return None
    arguments = dict(content["json_schema"])
    definitions = {key: arguments.pop(key) for key in ("$defs", "definitions") if key in arguments}
    properties = {key: arguments if value is None else {"const": value} for key, value in call.items()}
    schema = {
        "type": "object", "properties": properties, "required": list(properties), "additionalProperties": False,
        **definitions,
    }  # fmt: skip
    return {**tag, "begin": "", "content": {"type": "json_schema", "json_schema": schema}, "end": ""}


def _several(calls: CallTags, parallel: bool) -> Format:
    return {
        "type": "tags_with_separator",
        "tags": calls.tags,
        "separator": calls.separator or "",
        "at_least_one": True,
        "stop_after_first": not parallel or calls.separator is None,
    }


def _text_format(constraint: StructuredOutputsParams) -> Format | None:
    """A constraint as a part of a structural tag."""
    if constraint.json is not None:
        schema = constraint.json
        return {"type": "json_schema", "json_schema": json.loads(schema) if isinstance(schema, str) else schema}
    if constraint.json_object:
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if constraint.regex is not None:
        return {"type": "regex", "pattern": constraint.regex}
    if constraint.grammar is not None:
        return {"type": "grammar", "grammar": constraint.grammar}
    if constraint.choice is not None:
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in constraint.choice]}
    tag = json.loads(constraint.structural_tag or "{}")
    form: Format | None = tag.get("format") if isinstance(tag, dict) else None
    return form
