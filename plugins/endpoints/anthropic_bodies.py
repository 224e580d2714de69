"""Request bodies of the Anthropic routes, as Anthropic's client sends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from frame import StructuredOutputsParams
from frame.interfaces import MAX_INT, BoundedModel, Name, SamplingFields, Text, at_most, limits_of
from frame.quoting import quoted

from .anthropic_context import refusal_of_edits
from .transfer_params import TransferParams

_MANY = Field(max_length=1 << 16, fail_fast=True)  # a coarse bound; the configured one is usually far lower
_TOOLS = Field(max_length=512, fail_fast=True)

Object = dict[str, Any]  # free form: bounded by the size and depth of the body


class AnthropicMessage(BoundedModel):
    """One message: a text, or content blocks."""

    role: Literal["user", "assistant", "system"]
    content: Text | Annotated[list[Object], Field(max_length=1024, fail_fast=True)]


class AnthropicTool(BoundedModel):
    """A function that the model may call. Server tools carry another `type`."""

    not_served: ClassVar[Mapping[str, str]] = {"defer_loading": "every tool is in the prompt"}

    name: Name
    type: Name | None = None
    description: Text = ""
    input_schema: Object = Field(default_factory=dict)
    strict: bool = False
    cache_control: Object | None = None
    input_examples: Annotated[list[Object], _TOOLS] | None = None
    allowed_callers: Annotated[list[Name], _TOOLS] | None = None
    eager_input_streaming: bool | None = None

    @field_validator("type")
    @classmethod
    def _functions_only(cls, value: str | None) -> str | None:
        if value not in (None, "custom"):
            raise ValueError(f"this server has no tool type {quoted(value)}; there is: custom")
        return value


class ToolChoice(BoundedModel):
    """Whether and what the model must call."""

    type: Literal["auto", "any", "tool", "none"]
    name: Name | None = None
    disable_parallel_tool_use: bool = False


class Thinking(BoundedModel):
    """Whether the model may reason first. Budgets are accepted and not enforced."""

    type: Literal["enabled", "disabled", "adaptive", "between_tools"]
    budget_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    display: Literal["summarized", "omitted"] | None = None


class OutputFormat(BoundedModel):
    """What the answer must be."""

    model_config = ConfigDict(populate_by_name=True)

    type: Literal["json_schema"]
    json_schema: Object = Field(alias="schema")


class OutputConfig(BoundedModel):
    """Effort and format."""

    effort: Name | None = None
    format: OutputFormat | None = None


class Metadata(BoundedModel):
    """Data about the user; accepted and not used."""

    user_id: Name | None = None


class ConversationBody(SamplingFields):
    """`POST /v1/messages/count_tokens`, and what a conversation is in `POST /v1/messages`."""

    not_served: ClassVar[Mapping[str, str]] = {
        "container": "there is no code execution here",
        "mcp_servers": "tool servers are used through /v1/responses",
    }

    model: Name | None = None
    messages: Annotated[list[AnthropicMessage], Field(min_length=1), _MANY]
    system: Text | Annotated[list[Object], Field(max_length=1024, fail_fast=True)] | None = None
    tools: Annotated[list[AnthropicTool], _TOOLS] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    cache_control: Object | None = None
    context_management: Object | None = None
    speed: Name | None = None
    user_profile_id: Name | None = None
    workspace_id: Name | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _bound_messages(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list):
            at_most(len(value), "max_messages", info, "messages")
        return value

    @model_validator(mode="after")
    def _check_edits(self, info: ValidationInfo) -> ConversationBody:
        limits = limits_of(info)
        longest = None if limits is None else limits.max_model_len
        reason = refusal_of_edits(self.context_management or {}, self.messages, longest)
        if reason is not None:
            raise ValueError(reason)
        return self

    @model_validator(mode="after")
    def _check_choice(self) -> ConversationBody:
        names = [tool.name for tool in self.tools or ()]
        if len(set(names)) != len(names):
            raise ValueError("tools must have different names")
        choice = self.tool_choice
        if choice is not None and choice.type in ("any", "tool") and not names:
            raise ValueError(f"tool_choice {quoted(choice.type)} needs tools")
        if choice is not None and choice.type == "tool" and choice.name not in names:
            raise ValueError(f"tool_choice names {quoted(choice.name)}, which is not in tools")
        return self


class MessagesBody(ConversationBody):
    """`POST /v1/messages`. Accepts the fields of the sampling parameters too."""

    max_tokens: int = Field(ge=1, le=MAX_INT)
    stop_sequences: Annotated[list[Annotated[str, Field(min_length=1, max_length=1 << 16)]], _MANY] | None = None
    stream: bool = False
    metadata: Metadata | None = None
    service_tier: Name | None = None
    inference_geo: Name | None = None
    diagnostics: Object | None = None
    priority: int = Field(0, ge=-MAX_INT, le=MAX_INT)
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    kv_transfer_params: TransferParams | None = None

    def constraint(self) -> StructuredOutputsParams | None:
        """What the output must obey; None for free text."""
        wanted = self.output_config.format if self.output_config is not None else None
        return None if wanted is None else StructuredOutputsParams(json=wanted.json_schema)

    @field_validator("n")
    @classmethod
    def _one_answer(cls, value: int | None) -> int | None:
        if value not in (None, 1):
            raise ValueError(f"must be 1, got {value}")
        return value

    @field_validator("stop_sequences")
    @classmethod
    def _bound_stops(cls, value: list[str] | None, info: ValidationInfo) -> list[str] | None:
        if value and limits_of(info) is not None:
            at_most(len(value), "max_stop", info, "entries")
            at_most(max(map(len, value)), "max_stop_length", info, "characters in one entry")
        return value
