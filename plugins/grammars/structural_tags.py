"""Structural tags: JSON that says which grammar holds at which place of a free text, such as inside tool calls.

Both forms that vLLM accepts: `structures` with `triggers`, and a tree of `format`s (const_string, json_schema, regex,
grammar, any_text, sequence, or, tag, triggered_tags, tags_with_separator). Imports no grammar library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from frame.quoting import quoted

from .notation import Style, literal, regex_grammar, schema_grammar, text_grammar

_TEXT = r"/(.|\n)*/"
_MAX_DEPTH = 64
_FORMATS = (
    "const_string", "json_schema", "regex", "grammar", "any_text", "sequence", "or", "tag", "triggered_tags",
    "tags_with_separator",
)  # fmt: skip


def tag_grammars(tag: Any, style: Style) -> list[dict[str, Any]]:
    """The grammars of a structural tag, the starting one first; raises `ValueError` that names the field."""
    writer = _Writer(style)
    if not isinstance(tag, Mapping):
        raise ValueError("structured_outputs.structural_tag must be a JSON object")
    if "structures" in tag:
        start = writer.triggered(_from_structures(tag), 0)
    elif "format" in tag:
        start = writer.expression(tag["format"], 0)
    else:
        raise ValueError("structured_outputs.structural_tag needs format, or structures and triggers")
    return writer.parts(start)


def _from_structures(tag: Mapping[str, Any]) -> dict[str, Any]:
    """The form with `structures` and `triggers`, as a format."""
    structures, triggers = tag["structures"], tag.get("triggers")
    if not isinstance(structures, list) or any(not isinstance(one, Mapping) for one in structures):
        raise ValueError("structures of a structural tag must be a list of objects with begin, schema and end")
    tags = [
        {
            "begin": one.get("begin"),
            "content": {"type": "json_schema", "json_schema": one.get("schema", {})},
            "end": one.get("end"),
        }
        for one in structures
    ]
    return {"triggers": triggers, "tags": tags}


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{what} of a structural tag must be text, got {json.dumps(value)[:80]}")
    return value


def _list(value: Any, what: str) -> list[Any]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{what} of a structural tag must be a non-empty list, got {json.dumps(value)[:80]}")
    return value


class _Writer:
    """Writes the rules of one tag."""

    def __init__(self, style: Style) -> None:
        self._style = style
        self._rules: list[str] = []
        self._others: list[dict[str, Any]] = []
        names = sorted(style.special_tokens, key=len, reverse=True)
        self._special = re.compile("|".join(map(re.escape, names)) or "(?!)")

    def parts(self, start: str) -> list[dict[str, Any]]:
        """The grammars that were written, the starting one first."""
        return [{"name": "tag", "lark_grammar": "\n".join([f"start: {start}", *self._rules])}, *self._others]

    def expression(self, form: Any, depth: int) -> str:
        """The right side of a rule for a format."""
        kind = form.get("type") if isinstance(form, Mapping) else None
        if kind not in _FORMATS:
            raise ValueError(
                f"format type of a structural tag must be one of {', '.join(_FORMATS)}, got {quoted(kind)}"
            )
        if depth > _MAX_DEPTH:
            raise ValueError(f"formats of a structural tag nest deeper than {_MAX_DEPTH}")
        write = getattr(self, f"_{kind}", None)
        if write is None:
            return self.triggered(form, depth)
        return str(write(form, depth))

    def triggered(self, form: Mapping[str, Any], depth: int) -> str:
        """Free text in which each trigger begins one of the tags that start with it."""
        triggers = [_text(one, "a trigger") for one in _list(form.get("triggers"), "triggers")]
        tags = _list(form.get("tags"), "tags")
        branches = []
        for trigger in triggers:
            rests = [self._tag(one, depth + 1, trigger) for one in tags if _begin(one).startswith(trigger)]
            if rests:
                branches.append(f"{self._until(trigger)} ({' | '.join(rests)})")
        orphan = next((_begin(one) for one in tags if not _begin(one).startswith(tuple(triggers))), None)
        if orphan is not None:
            raise ValueError(f"begin {quoted(orphan)} of a structural tag starts with none of its triggers")
        if any(not trigger for trigger in triggers):
            raise ValueError("a trigger of a structural tag must not be empty")
        one = self._rule("(" + " | ".join(branches) + ")")
        if form.get("stop_after_first"):
            return one if form.get("at_least_one") else f"({one} | {self._free()})"
        return f"{one}{'+' if form.get('at_least_one') else '*'} {self._free()}"

    def _const_string(self, form: Mapping[str, Any], depth: int) -> str:
        return self._literal(_text(form.get("value"), "value"))

    def _json_schema(self, form: Mapping[str, Any], depth: int) -> str:
        return self._part(schema_grammar(form.get("json_schema"), self._style))

    def _regex(self, form: Mapping[str, Any], depth: int) -> str:
        return self._part(regex_grammar(_text(form.get("pattern"), "pattern")))

    def _grammar(self, form: Mapping[str, Any], depth: int) -> str:
        return self._part(text_grammar(_text(form.get("grammar"), "grammar")))

    def _any_text(self, form: Mapping[str, Any], depth: int) -> str:
        return self._free()

    def _sequence(self, form: Mapping[str, Any], depth: int) -> str:
        elements = _list(form.get("elements"), "elements")
        written = []
        skip = False
        for element, after in zip(elements, [*elements[1:], {}], strict=True):
            if skip:
                skip = False
                continue
            constant = isinstance(after, Mapping) and after.get("type") == "const_string" and after.get("value")
            if constant and isinstance(element, Mapping) and element.get("type") == "any_text":
                written.append(self._until(_text(after["value"], "value")))
                skip = True
            else:
                written.append(self.expression(element, depth + 1))
        return "(" + " ".join(written) + ")"

    def _or(self, form: Mapping[str, Any], depth: int) -> str:
        return (
            "(" + " | ".join(self.expression(one, depth + 1) for one in _list(form.get("elements"), "elements")) + ")"
        )

    def _tag(self, form: Any, depth: int, trigger: str = "") -> str:
        """A tag without the `trigger` that was written before."""
        begin = _begin(form)[len(trigger) :]
        ends = form.get("end")
        ends = [_text(one, "end") for one in (ends if isinstance(ends, list) and ends else [ends])]
        content = form.get("content")
        if isinstance(content, Mapping) and content.get("type") == "any_text" and all(ends):
            body = "(" + " | ".join(self._until(end) for end in ends) + ")"
        else:
            body = self.expression(content, depth + 1) + " (" + " | ".join(map(self._literal, ends)) + ")"
        return self._rule(f"{self._literal(begin)} {body}")

    def _tags_with_separator(self, form: Mapping[str, Any], depth: int) -> str:
        tags = self._rule(" | ".join(self._tag(one, depth + 1) for one in _list(form.get("tags"), "tags")))
        separator = self._literal(_text(form.get("separator"), "separator"))
        several = tags if form.get("stop_after_first") else f"{tags} ({separator} {tags})*"
        return f"({several})" if form.get("at_least_one") else f"({several})?"

    def _literal(self, text: str) -> str:
        """A text as a Lark expression; special tokens in it become those tokens."""
        pieces, last = [], 0
        for match in self._special.finditer(text):
            pieces += [literal(text[last : match.start()])] if match.start() > last else []
            pieces.append(f"<[{self._style.special_tokens[match.group()]}]>")
            last = match.end()
        if last < len(text) or not pieces:
            pieces.append(literal(text[last:]))
        return " ".join(pieces)

    def _until(self, text: str) -> str:
        """Free text up to the first `text`, and that text."""
        written = self._literal(text)
        if written.startswith("<["):
            return f"{self._free()} {written}"
        first = self._special.split(text, maxsplit=1)[0]
        name = f"until_{len(self._rules)}"
        self._rules.append(f"{name}[lazy]: {_TEXT} {literal(first)}")
        return f"{name} {self._literal(text[len(first) :])}" if text[len(first) :] else name

    def _free(self) -> str:
        if "TEXT: " + _TEXT not in self._rules:
            self._rules.append("TEXT: " + _TEXT)
        return "TEXT"

    def _rule(self, right: str) -> str:
        name = f"rule_{len(self._rules)}"
        self._rules.append(f"{name}: {right}")
        return name

    def _part(self, part: dict[str, Any]) -> str:
        name = f"part_{len(self._others)}"
        self._others.append({"name": name, **part})
        return f"@{name}"


def _begin(form: Any) -> str:
    if not isinstance(form, Mapping):
        raise ValueError(f"a tag of a structural tag must be an object, got {json.dumps(form)[:80]}")
    return _text(form.get("begin"), "begin")
