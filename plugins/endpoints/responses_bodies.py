"""Request bodies of the Responses routes, as OpenAI's client sends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field, ValidationInfo, field_validator, model_validator

from frame import StructuredOutputsParams
from frame.interfaces import MAX_INT, BoundedModel, Name, SamplingFields, Settings, Text, at_most, bound_logprobs, few

from .structured import StructuredOutputs
from .transfer_params import TransferParams

_MANY = Field(max_length=1 << 16, fail_fast=True)  # a coarse bound; the configured one is usually far lower
_TOOLS = Field(max_length=512, fail_fast=True)
Includable = Literal[
    "message.output_text.logprobs", "reasoning.encrypted_content", "code_interpreter_call.outputs",
    "web_search_call.action.sources", "web_search_call.results", "file_search_call.results",
    "message.input_image.image_url", "computer_call_output.output.image_url",
]  # fmt: skip

Object = dict[str, Any]  # free form: bounded by the size and depth of the body


class Reasoning(BoundedModel):
    """How much the model reasons. Reasoning is returned as it is, not as a summary."""

    effort: Name | None = None
    summary: Name | None = None
    generate_summary: Name | None = None


class TextFormat(BoundedModel):
    """Free text, any JSON object, or one that obeys a schema."""

    type: Literal["text", "json_object", "json_schema"] = "text"
    name: Name | None = None
    schema_: Object | None = Field(None, alias="schema")
    description: Text | None = None
    strict: bool | None = None

    @model_validator(mode="after")
    def _named(self) -> TextFormat:
        if self.type == "json_schema" and (self.name is None or self.schema_ is None):
            raise ValueError("of type 'json_schema' needs name and schema")
        return self

    def constraint(self) -> StructuredOutputsParams | None:
        """The constraint for the engine; None for free text."""
        if self.type == "json_object":
            return StructuredOutputsParams(json_object=True)
        return StructuredOutputsParams(json=self.schema_) if self.type == "json_schema" else None

    def shown(self) -> Object:
        """The format as the response shows it."""
        return self.model_dump(by_alias=True, exclude_none=True)


class TextConfig(BoundedModel):
    """The format of the answer's text."""

    format: TextFormat = Field(default_factory=TextFormat)
    verbosity: Name | None = None


class ResponseStreamOptions(BoundedModel):
    """Accepted and not used."""

    include_obfuscation: bool = False


class InputBody(SamplingFields):
    """`POST /v1/responses/input_tokens`, and what a conversation is in `POST /v1/responses`."""

    not_served: ClassVar[Mapping[str, str]] = {
        "conversation": "send previous_response_id",
        "prompt": "this server stores no prompts",
        "moderation": "this server moderates nothing",
        "context_management": "the conversation is used as it is sent",
        "access_programs": "this server has none",
        "personality": "this server has none",
        "previous_input_messages": "send all messages in input, or previous_response_id",
        "enable_response_messages": "the response holds only the output",
        "messages": "send input",
        "response_format": "send text.format",
        "chat_template": "the server's chat template is used",
        "mm_processor_kwargs": "inputs are text",
        "media_io_kwargs": "inputs are text",
        "max_tokens": "send max_output_tokens",
        "max_completion_tokens": "send max_output_tokens",
        "prompt_logprobs": "send it to /v1/completions",
        "thinking_token_budget": "reasoning and answer share max_output_tokens",
    }

    model: Name | None = None
    input: Text | Annotated[list[Object], _MANY] = ""
    instructions: Text | None = None
    previous_response_id: Name | None = None
    tools: Annotated[list[Object], _TOOLS] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool = True
    reasoning: Reasoning | None = None
    text: TextConfig = Field(default_factory=TextConfig)
    truncation: Literal["auto", "disabled"] = "disabled"
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=64), few(64)] | None = None

    @field_validator("input", mode="before")
    @classmethod
    def _bound_items(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list):
            at_most(len(value), "max_messages", info, "items")
        return value


class ResponsesBody(InputBody):
    """`POST /v1/responses`. Accepts the fields of the sampling parameters too."""

    background: bool = False
    stream: bool = False
    stream_options: ResponseStreamOptions | None = None
    store: bool = True
    include: Annotated[list[Includable], Field(max_length=64, fail_fast=True)] | None = None
    max_output_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    max_tool_calls: int | None = Field(None, ge=1, le=MAX_INT)
    metadata: Annotated[dict[Name, Annotated[str, Field(max_length=4096)]], Field(max_length=16), few(16)] | None = None
    top_logprobs: int | None = Field(None, ge=0, le=MAX_INT)
    structured_outputs: StructuredOutputs | None = None
    priority: int = Field(0, ge=-MAX_INT, le=MAX_INT)
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_transfer_params: TransferParams | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None = None
    # accepted, since OpenAI's clients send them; they have no effect
    user: Name | None = None
    prompt_cache_key: Name | None = None
    prompt_cache_options: Settings | None = None
    prompt_cache_retention: Name | None = None
    safety_identifier: Name | None = None
    service_tier: Name | None = None
    image: Settings | None = None

    @field_validator("n")
    @classmethod
    def _one_answer(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError(f"must be 1, got {value}")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _bound_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        return bound_logprobs(value, info)

    @model_validator(mode="after")
    def _check_together(self) -> ResponsesBody:
        if self.background and not self.store:
            raise ValueError("background needs store=true: the response is fetched later")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        if self.input == "" and self.previous_response_id is None and self.instructions is None:
            raise ValueError("input is missing")
        self.constraint()
        return self

    @property
    def with_logprobs(self) -> bool:
        """Whether log-probabilities are shown."""
        return bool(self.top_logprobs) or "message.output_text.logprobs" in (self.include or ())

    def constraint(self) -> StructuredOutputsParams | None:
        """What the output must obey; raises `ValueError` when two fields constrain it."""
        formatted = self.text.format.constraint()
        if self.structured_outputs is None:
            return formatted
        if formatted is not None:
            raise ValueError("structured_outputs and text.format both constrain the output; send one of them")
        return self.structured_outputs.params()
