"""Constraints on the output as bodies state them: OpenAI's `response_format` and vLLM's `structured_outputs`."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator, model_validator

from frame import StructuredOutputsParams
from frame.interfaces import BoundedModel, Name, Text
from frame.quoting import quoted

_MAX_CHOICES = 4096
_MAX_TAGS = 256

Object = dict[str, Any]  # free form: bounded by the size and depth of the body


class StructuredOutputs(BoundedModel):
    """vLLM's `structured_outputs`. The engine bounds its size, and compiles it before the request runs."""

    schema_: Object | Text | None = Field(None, alias="json")
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=_MAX_CHOICES, fail_fast=True)] | None = None
    grammar: Text | None = None
    json_object: bool | None = None
    structural_tag: Object | Text | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: Text | None = None

    def params(self) -> StructuredOutputsParams:
        """The parameters for the engine; raises `ValueError` unless there is exactly one constraint."""
        tag = self.structural_tag
        params = StructuredOutputsParams(
            json=self.schema_,
            regex=self.regex,
            choice=self.choice,
            grammar=self.grammar,
            json_object=self.json_object or None,
            structural_tag=json.dumps(tag) if isinstance(tag, dict) else tag,
            disable_fallback=self.disable_fallback,
            disable_any_whitespace=self.disable_any_whitespace,
            disable_additional_properties=self.disable_additional_properties,
            whitespace_pattern=self.whitespace_pattern,
        )
        params.verify()
        return params

    @model_validator(mode="after")
    def _one_constraint(self) -> StructuredOutputs:
        try:
            self.params()
        except ValueError as error:  # the caller puts the field's name before this message
            raise ValueError(str(error).removeprefix("structured_outputs").lstrip(" .")) from None
        return self


class JsonSchema(BoundedModel):
    """OpenAI's named schema. It is enforced whether `strict` or not."""

    name: Name
    schema_: Object | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None


class ResponseFormat(BoundedModel):
    """OpenAI's `response_format`, and vLLM's structural tags in both of their forms."""

    type: Literal["text", "json_object", "json_schema", "structural_tag"] = "text"
    json_schema: JsonSchema | None = None
    structures: Annotated[list[Object], Field(max_length=_MAX_TAGS, fail_fast=True)] | None = None
    triggers: Annotated[list[Text], Field(max_length=_MAX_TAGS, fail_fast=True)] | None = None
    format: Object | None = None

    @field_validator("type", mode="before")
    @classmethod
    def _known_type(cls, value: Any) -> Any:
        known = ("text", "json_object", "json_schema", "structural_tag")
        if value not in known:
            raise ValueError(f"must be one of {', '.join(known)}, got {quoted(value)}")
        return value

    @model_validator(mode="after")
    def _has_what_its_type_needs(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError("of type 'json_schema' needs json_schema, with name and schema")
        if self.type == "structural_tag" and self.format is None and (self.structures is None or not self.triggers):
            raise ValueError("of type 'structural_tag' needs format, or structures and triggers")
        return self

    def params(self) -> StructuredOutputsParams | None:
        """The parameters for the engine; None for plain text."""
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        if self.type == "json_schema" and self.json_schema is not None:
            return StructuredOutputsParams(json=self.json_schema.schema_ or {})
        if self.type == "structural_tag":
            tag: Object = {"type": "structural_tag", "format": self.format}
            if self.format is None:
                tag = {"type": "structural_tag", "structures": self.structures, "triggers": self.triggers}
            return StructuredOutputsParams(structural_tag=json.dumps(tag))
        return None


def constraint_of(
    structured_outputs: StructuredOutputs | None, response_format: ResponseFormat | None
) -> StructuredOutputsParams | None:
    """The one constraint of a body; raises `ValueError` when both fields state one."""
    formatted = response_format.params() if response_format is not None else None
    if structured_outputs is None:
        return formatted
    if formatted is not None:
        raise ValueError("structured_outputs and response_format both constrain the output; send one of them")
    return structured_outputs.params()
