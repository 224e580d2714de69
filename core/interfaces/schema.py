"""The bounded request schema: what the body of any HTTP route may hold.

Every field has a bound. Bounds that depend on the configuration or the model come as `Limits` in the validation
context; the others are written here. Routes derive their bodies from `BoundedModel` and `SamplingFields`, so that each
bound is stated once. Knows no route and no web framework.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from frame.quoting import quoted

from ..config.errors import near
from .sampling import MAX_INT, MIN_REPETITION_PENALTY, RequestOutputKind, SamplingParams

#: Bounds that no setting changes.
MAX_TEXT = 1 << 24
MAX_TOKEN_LIST = 1 << 20
MAX_BIASES = 4096
MAX_BAD_WORDS = 1024
MAX_NAME = 256
MAX_EXTRA = 64
MAX_VALUE = 4096
MAX_FLOAT = 1e38


@dataclass(frozen=True)
class Limits:
    """Bounds that depend on the configuration and the model. `max_logprobs` -1 is the vocabulary."""

    max_model_len: int
    vocab_size: int
    max_logprobs: int
    max_n: int
    max_prompts: int
    max_messages: int
    max_stop: int
    max_stop_length: int
    strict_fields: bool = False
    trust_request_chat_template: bool = False
    max_outputs: int = 1024
    max_inputs: int = 2048
    #: called with the name of each field that is ignored; None: nobody needs it
    ignored: Callable[[str], None] | None = None


def few(limit: int) -> BeforeValidator:
    """Refuses a mapping of more than `limit` entries before its entries are checked, each of which may be an error."""

    def count(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > limit:
            raise ValueError(f"must have at most {limit} entries, got {len(value)}")
        return value

    return BeforeValidator(count)


Name = Annotated[str, Field(max_length=MAX_NAME)]
Text = Annotated[str, Field(max_length=MAX_TEXT)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT)]
#: The first wrong entry ends the check: to report a million of them would take seconds.
TokenIds = Annotated[list[TokenId], Field(max_length=MAX_TOKEN_LIST, fail_fast=True)]
Words = Annotated[str, Field(min_length=1, max_length=MAX_TEXT)]
Scalar = (
    bool
    | Annotated[int, Field(ge=-(2**63), lt=2**64)]
    | Annotated[float, Field(ge=-MAX_FLOAT, le=MAX_FLOAT)]
    | Annotated[str, Field(max_length=MAX_VALUE)]
    | None
)
#: An object with any names and plain values.
Settings = Annotated[
    dict[Name, Scalar | Annotated[list[Scalar], Field(max_length=MAX_VALUE, fail_fast=True)]],
    Field(max_length=MAX_EXTRA),
    few(MAX_EXTRA),
]


class BoundedModel(BaseModel):
    """A request body, or a part of one. Values must have the JSON type of their field: no text for a number.

    Null means that a field is left out. Unknown fields are ignored, or refused under `strict_fields`.
    """

    #: known fields that are not served → why; they are refused unless their value is null, false, 0 or empty
    not_served: ClassVar[Mapping[str, str]] = {}

    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False, protected_namespaces=())

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any, info: ValidationInfo) -> Any:
        if not isinstance(data, dict):
            return data
        for name, reason in cls.not_served.items():
            if data.get(name) not in (None, False, "", 0, [], {}):
                raise ValueError(f"{name} is not served: {reason}")
        limits = limits_of(info)
        if limits is not None and (limits.strict_fields or limits.ignored is not None):
            known = {*cls.not_served, *cls.model_fields, *(one.alias for one in cls.model_fields.values())}
            unknown = sorted(str(name)[:MAX_NAME] for name in data if name not in known)
            if unknown and limits.strict_fields:
                raise ValueError(f"unknown field {quoted(unknown[0])}{near(unknown[0], cls.model_fields)}")
            if limits.ignored is not None:
                for name in unknown:
                    limits.ignored(name)
        optional = [name for name, field in cls.model_fields.items() if name in data and not field.is_required()]
        left_out = {name for name in optional if data[name] is None}
        return {name: value for name, value in data.items() if name not in left_out} if left_out else data


def limits_of(info: ValidationInfo) -> Limits | None:
    """Returns the limits of the validation context; None outside a server."""
    return (info.context or {}).get("limits")


class SamplingFields(BoundedModel):
    """The fields of every route that generates: how tokens are drawn, and when the output ends."""

    n: int | None = Field(None, ge=1, le=MAX_INT)
    temperature: float | None = Field(None, ge=0, le=1e4)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1, le=MAX_INT)
    min_p: float | None = Field(None, ge=0, le=1)
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, ge=MIN_REPETITION_PENALTY, le=1e4)
    seed: int | None = Field(None, ge=-(2**63), lt=2**64)
    max_tokens: int | None = Field(None, ge=1, le=MAX_INT)
    min_tokens: int | None = Field(None, ge=0, le=MAX_INT)
    stop: Words | Annotated[list[Words], Field(max_length=MAX_BIASES, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_BIASES, fail_fast=True)] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    truncate_prompt_tokens: int | None = Field(None, ge=-1, le=MAX_INT)
    prompt_logprobs: int | None = Field(None, ge=-1, le=MAX_INT)
    allowed_token_ids: (
        Annotated[list[TokenId], Field(min_length=1, max_length=MAX_TOKEN_LIST, fail_fast=True)] | None
    ) = None
    bad_words: Annotated[list[Words], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^\d{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASES),
            few(MAX_BIASES),
        ]
        | None
    ) = None
    extra_args: Settings | None = None
    deterministic: bool = False

    @field_validator("n", "prompt_logprobs")
    @classmethod
    def _bound_number(cls, value: int | None, info: ValidationInfo) -> int | None:
        return at_most(value, "max_n", info) if info.field_name == "n" else bound_logprobs(value, info)

    @field_validator("allowed_token_ids", mode="before")
    @classmethod
    def _bound_allowed(cls, value: Any, info: ValidationInfo) -> Any:
        limits = limits_of(info)
        if limits is not None and isinstance(value, list) and len(value) > limits.vocab_size:
            raise ValueError(f"must have at most {limits.vocab_size} entries, the vocabulary, got {len(value)}")
        return value

    @field_validator("stop", "bad_words")
    @classmethod
    def _bound_words(cls, value: str | list[str] | None, info: ValidationInfo) -> str | list[str] | None:
        limits = limits_of(info)
        words = [value] if isinstance(value, str) else value or []
        if limits is not None:
            if info.field_name == "stop":
                at_most(len(words), "max_stop", info, "entries")
            longest = max(map(len, words), default=0)
            at_most(longest, "max_stop_length", info, "characters in one entry")
        return value

    @model_validator(mode="before")
    @classmethod
    def _read_vllm_names(cls, data: Any) -> Any:
        if isinstance(data, dict) and "vllm_xargs" in data and "extra_args" not in data:
            data = dict(data)
            data["extra_args"] = data.pop("vllm_xargs")
        return data

    def sampling(self, defaults: SamplingParams, **fields: Any) -> SamplingParams:
        """Returns the parameters of the request: its own, else those of `defaults`; `fields` are set by the route.

        Raises `ValueError` naming a field whose value contradicts another.
        """
        given = {name: getattr(self, name) for name in SamplingFields.model_fields}
        if self.logit_bias is not None:
            given["logit_bias"] = {int(token): bias for token, bias in self.logit_bias.items()}
        values = {name: getattr(defaults, name) for name in SamplingParams.__struct_fields__}
        values.update({name: value for name, value in given.items() if value is not None})
        values.update(max_tokens=self.max_tokens, output_kind=RequestOutputKind.DELTA, skip_clone=True)
        values.update(fields)
        return SamplingParams(**values)


def at_most(value: int | None, limit: str, info: ValidationInfo, what: str = "") -> int | None:
    """Returns `value`; raises `ValueError` when it is above the limit called `limit`. `what` is the unit in errors."""
    limits = limits_of(info)
    if value is not None and limits is not None and value > getattr(limits, limit):
        most = f"{getattr(limits, limit)}{what and f' {what}'}"
        raise ValueError(f"must be at most {most} (--{limit.replace('_', '-')}), got {value}")
    return value


def bound_logprobs(value: int | None, info: ValidationInfo) -> int | None:
    """Returns a number of log-probabilities a token, -1 for the vocabulary; raises `ValueError` above the limit."""
    limits = limits_of(info)
    if value is None or limits is None or limits.max_logprobs == -1:
        return value
    if value == -1 or value > limits.max_logprobs:
        raise ValueError(f"must be at most {limits.max_logprobs} (--max-logprobs), got {value}")
    return value
