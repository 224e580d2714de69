"""Request bodies of the OpenAI routes, as OpenAI's and vLLM's clients send them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import ConfigDict, Field, ValidationInfo, field_validator, model_validator

from frame import StructuredOutputsParams
from frame.interfaces import (
    MAX_INT,
    MAX_TOKEN_LIST,
    BoundedModel,
    Name,
    SamplingFields,
    Settings,
    Text,
    TokenIds,
    at_most,
    bound_logprobs,
    few,
    limits_of,
)
from frame.quoting import quoted

from .structured import ResponseFormat, StructuredOutputs, constraint_of
from .transfer_params import TransferParams

_MAX_PARTS = 1024
_MAX_TOOLS = 512
_MAX_LIST = 1 << 16  # a coarse bound; the configured one is usually far lower
_MANY = Field(max_length=_MAX_LIST, fail_fast=True)
_GRAMMAR = "send structured_outputs"

#: Embeddings in base64; bounded by the size of the body as well.
Embeds = Annotated[str, Field(min_length=1, max_length=1 << 28)]
Object = dict[str, Any]  # free form: bounded by the size and depth of the body


class StreamOptions(BoundedModel):
    """What a stream says about usage."""

    include_usage: bool = False
    continuous_usage_stats: bool = False
    include_obfuscation: bool = False


class GenerationBody(SamplingFields):
    """What chat and text completions have in common."""

    not_served: ClassVar[Mapping[str, str]] = {
        "use_beam_search": "beam search is offered in Python only",
        "guided_json": _GRAMMAR,
        "guided_regex": _GRAMMAR,
        "guided_choice": _GRAMMAR,
        "guided_grammar": _GRAMMAR,
        "regex": _GRAMMAR,
        "ebnf": _GRAMMAR,
        "json_schema": "send response_format",
        "early_stopping": "beam search is offered in Python only",
        "repetition_detection": "outputs are not searched for repetitions; send max_tokens",
        "media_io_kwargs": "prompts are text",
        "logits_processors": "processors are named on the command line",
    }

    model: Name | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: Name | None = None
    request_id: Annotated[str, Field(min_length=1, max_length=128, pattern=r"^[\x21-\x7e]+$")] | None = None
    priority: int = Field(0, ge=-MAX_INT, le=MAX_INT)
    cache_salt: Annotated[str, Field(min_length=1, max_length=256)] | None = None
    echo: bool = False
    add_special_tokens: bool | None = None
    return_token_ids: bool = False
    return_timing: bool = False
    return_tokens_as_token_ids: bool = False
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    kv_transfer_params: TransferParams | None = None
    # accepted where they ask for what the server does anyway
    length_penalty: float | None = Field(None, ge=-1e4, le=1e4)
    thinking_token_budget: int | None = Field(None, ge=-1, le=MAX_INT)
    # accepted, since OpenAI's clients send them; they have no effect
    prompt_cache_key: Name | None = None
    safety_identifier: Name | None = None
    service_tier: Name | None = None

    @field_validator("length_penalty")
    @classmethod
    def _no_beams(cls, value: float | None) -> float | None:
        if value not in (None, 1.0):
            raise ValueError(f"is for beam search, which is offered in Python only; leave it out, got {value}")
        return value

    @field_validator("thinking_token_budget")
    @classmethod
    def _no_budget(cls, value: int | None) -> int | None:
        if value not in (None, -1):
            raise ValueError(f"is not served: reasoning and answer share max_tokens; leave it out, got {value}")
        return value

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> GenerationBody:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream=true")
        return self

    @model_validator(mode="after")
    def _one_constraint(self) -> GenerationBody:
        self.constraint()
        return self

    def constraint(self) -> StructuredOutputsParams | None:
        """What the output must obey: a schema, a grammar, …; None for free text."""
        return constraint_of(self.structured_outputs, self.response_format)


class CompletionBody(GenerationBody):
    """`POST /v1/completions`. `prompt` is text, token ids, or a list of either.

    `prompt_embeds` are further prompts, which come first: safetensors bytes as base64, one or a list. With them
    `prompt` may be missing or empty.
    """

    not_served: ClassVar[Mapping[str, str]] = {
        **GenerationBody.not_served,
        "suffix": "no supported model fills in text before a suffix",
    }

    prompt: Text | TokenIds | Annotated[list[Text], _MANY] | Annotated[list[TokenIds], _MANY] | None = None
    prompt_embeds: Embeds | Annotated[list[Embeds], _MANY] | None = None
    max_tokens: int | None = Field(16, ge=0, le=MAX_INT)
    logprobs: int | None = Field(None, ge=0, le=MAX_INT)
    best_of: int | None = Field(None, ge=1, le=MAX_INT)

    @field_validator("prompt", mode="before")
    @classmethod
    def _check_prompt(cls, value: Any, info: ValidationInfo) -> Any:
        return None if value is None else check_prompts(value, info)

    @field_validator("best_of")
    @classmethod
    def _bound_best_of(cls, value: int | None, info: ValidationInfo) -> int | None:
        return at_most(value, "max_n", info)

    @field_validator("logprobs")
    @classmethod
    def _bound_logprobs_of_tokens(cls, value: int | None, info: ValidationInfo) -> int | None:
        return bound_logprobs(value, info)

    @model_validator(mode="after")
    def _check_together(self) -> CompletionBody:
        if self.prompt_embeds is None and self.prompt is None:
            raise ValueError("prompt must be text, token ids, or a non-empty list of either")
        if self.prompt_embeds is not None and self.echo:
            raise ValueError("echo is not for prompt_embeds, which have no text; leave it out")
        if self.best_of is not None and self.best_of < (self.n or 1):
            raise ValueError(f"best_of must be at least n {self.n or 1}, got {self.best_of}")
        if self.best_of is not None and self.best_of > (self.n or 1) and self.stream:
            raise ValueError("best_of above n cannot be streamed")
        if self.max_tokens == 0 and not self.echo:
            raise ValueError("max_tokens must be at least 1 unless echo is true, got 0")
        return self

    @model_validator(mode="after")
    def _bound_outputs(self, info: ValidationInfo) -> CompletionBody:
        limits, num_each = limits_of(info), self.best_of or self.n or 1
        num_prompts = len(self.embeds()) + len(self.prompts())
        at_most(num_prompts, "max_prompts", info, "prompts")
        if limits is not None and num_prompts * num_each > limits.max_outputs:
            raise ValueError(
                f"{num_prompts} prompts with {num_each} outputs each are {num_prompts * num_each} outputs; a request "
                f"may have {limits.max_outputs} (--max-outputs)"
            )
        return self

    def prompts(self) -> list[str | list[int]]:
        """The prompts that are text or ids, none, one or many."""
        if self.prompt is None or (self.prompt == "" and self.prompt_embeds is not None):
            return []
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [self.prompt]
        return list(self.prompt)

    def embeds(self) -> list[str]:
        """The prompts that are embeddings."""
        given = self.prompt_embeds
        return [] if given is None else [given] if isinstance(given, str) else given


def check_prompts(value: Any, info: ValidationInfo, limit: str = "max_prompts") -> Any:
    """Checks type and number of prompts before anything is converted; `limit` is the setting that bounds them."""
    if isinstance(value, str):
        return value
    limits = limits_of(info)
    if not isinstance(value, list) or not value:
        raise ValueError("must be text, token ids, or a non-empty list of either")
    kinds = set(map(type, value))
    if kinds == {int}:
        return _check_ids(value)
    if kinds not in ({str}, {list}):
        raise ValueError("must be text, token ids, or a list of either, not a mixture")
    if limits is not None:
        at_most(len(value), limit, info, limit.removeprefix("max_"))
    return [_check_ids(item) for item in value] if kinds == {list} else value


def _check_ids(ids: list[Any]) -> list[Any]:
    """One prompt of token ids, as it is."""
    if len(ids) > MAX_TOKEN_LIST:
        raise ValueError(f"must have at most {MAX_TOKEN_LIST} token ids")
    if set(map(type, ids)) <= {int} and min(ids, default=0) >= 0 and max(ids, default=0) <= MAX_INT:
        return ids
    wrong = next(token for token in ids if type(token) is not int or not 0 <= token <= MAX_INT)
    raise ValueError(f"must hold token ids from 0 to {MAX_INT}, got {quoted(wrong)}")


class Message(BoundedModel):
    """One message of a chat. Its other fields go to the chat template unchanged."""

    model_config = ConfigDict(extra="allow")

    role: Annotated[str, Field(min_length=1, max_length=64)]
    content: Text | Annotated[list[Object | Text], Field(max_length=_MAX_PARTS, fail_fast=True)] | None = None
    name: Name | None = None
    tool_calls: Annotated[list[Object], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = None
    tool_call_id: Name | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any, info: ValidationInfo) -> Any:
        return data


class ChatBody(GenerationBody):
    """`POST /v1/chat/completions`."""

    not_served: ClassVar[Mapping[str, str]] = {
        **GenerationBody.not_served,
        "functions": "send tools",
        "function_call": "send tool_choice",
        "audio": "answers are text",
        "web_search_options": "this server searches nothing",
        "moderation": "this server moderates nothing",
        "add_special_tokens": "the chat template writes them",
        "mm_processor_kwargs": "messages are text",
    }

    messages: Annotated[list[Message], Field(min_length=1, max_length=_MAX_LIST, fail_fast=True)]
    max_completion_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=-1, le=MAX_INT)
    tools: Annotated[list[Object], Field(max_length=_MAX_TOOLS, fail_fast=True)] | None = None
    tool_choice: Literal["none", "auto", "required"] | Object | None = None
    parallel_tool_calls: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    chat_template: Text | None = None
    chat_template_kwargs: Annotated[dict[Name, Any], Field(max_length=64), few(64)] | None = None
    documents: Annotated[list[Object], Field(max_length=_MAX_PARTS, fail_fast=True)] | None = None
    reasoning_effort: Name | None = None
    include_reasoning: bool = True
    store: bool | None = None
    metadata: Annotated[dict[Name, Text], Field(max_length=64), few(64)] | None = None
    verbosity: Name | None = None
    prompt_cache_options: Settings | None = None
    prompt_cache_retention: Name | None = None
    prediction: Object | None = None
    modalities: Annotated[list[Name], Field(max_length=8, fail_fast=True)] | None = None

    @field_validator("messages", mode="before")
    @classmethod
    def _bound_messages(cls, value: Any, info: ValidationInfo) -> Any:
        if isinstance(value, list):
            at_most(len(value), "max_messages", info, "messages")
        return value

    @field_validator("top_logprobs")
    @classmethod
    def _bound_top_logprobs(cls, value: int | None, info: ValidationInfo) -> int | None:
        return bound_logprobs(value, info)

    @field_validator("chat_template")
    @classmethod
    def _trusted_templates_only(cls, value: str | None, info: ValidationInfo) -> str | None:
        limits = limits_of(info)
        if value is not None and limits is not None and not limits.trust_request_chat_template:
            raise ValueError("is not accepted from requests; start the server with --trust-request-chat-template")
        return value

    @field_validator("modalities")
    @classmethod
    def _answers_are_text(cls, value: list[str] | None) -> list[str] | None:
        if value is not None and set(value) - {"text"}:
            raise ValueError("must be ['text']: answers are text")
        return value

    @model_validator(mode="after")
    def _check_together(self) -> ChatBody:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs=true")
        return self
