"""`SamplingParams`: how the tokens of a request are drawn, and when its output ends.

Field names and meanings follow vLLM's public `SamplingParams`. The front checks the bounds that depend on the model
(vocabulary, length) when it admits a request.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from enum import IntEnum
from typing import Any

import msgspec

from frame.quoting import quoted

from ..config.errors import near

logger = logging.getLogger(__name__)

#: Temperatures below this are greedy: the most likely token is taken.
GREEDY_EPSILON = 1e-5
#: Lower temperatures that are not greedy are raised to this, since logits would overflow.
MIN_TEMPERATURE = 1e-2
#: A lower top_p is zero in float32, and would keep no token.
MIN_TOP_P = 1e-30
#: The largest number of a field that counts tokens or choices, here and in requests over HTTP.
MAX_INT = 2**31 - 1
#: A lower repetition penalty makes logits infinite; its inverse is the highest one.
MIN_REPETITION_PENALTY = 1e-4


class RequestOutputKind(IntEnum):
    """What each output of a stream carries: all text so far, only what is new, or nothing before the end."""

    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


_CONSTRAINTS = ("json", "regex", "choice", "grammar", "json_object", "structural_tag")


class StructuredOutputsParams(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One constraint on the output, which a grammar plugin compiles. Raises `ValueError` for several.

    `json` is a JSON schema, `grammar` a grammar in Lark or GBNF, `structural_tag` JSON that says which grammar holds
    where in free text. `disable_any_whitespace`, `disable_additional_properties` and `whitespace_pattern` change what
    JSON is allowed. The constraint holds after the token ids `start_after` have appeared in the output, which end its
    reasoning; [] means at once.
    """

    json: str | dict[str, Any] | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    structural_tag: str | None = None
    disable_fallback: bool = False
    disable_any_whitespace: bool = False
    disable_additional_properties: bool = False
    whitespace_pattern: str | None = None
    start_after: list[int] = []

    def __post_init__(self) -> None:
        given = [name for name in _CONSTRAINTS if getattr(self, name) is not None]
        if len(given) > 1:
            raise ValueError(f"structured_outputs takes one constraint, got {len(given)}: {', '.join(given)}")

    @property
    def constraint(self) -> str | None:
        """The name of the field that holds the constraint; None when there is none."""
        given = (name for name in _CONSTRAINTS if getattr(self, name) not in (None, False))
        return next(given, None)

    def verify(self) -> None:
        """Checks that there is one constraint, of the right type; raises `ValueError` naming the field."""
        name = self.constraint
        if name is None:
            raise ValueError(f"structured_outputs needs one of: {', '.join(_CONSTRAINTS)}")
        self.__post_init__()
        value = getattr(self, name)
        if name == "choice":
            if not isinstance(value, list) or not value or any(not isinstance(each, str) for each in value):
                raise ValueError(f"structured_outputs.choice must be a non-empty list of strings, got {quoted(value)}")
        elif name == "json_object":
            if value is not True:
                raise ValueError(f"structured_outputs.json_object must be true or false, got {quoted(value)}")
        elif not isinstance(value, (str, dict) if name == "json" else str):
            kinds = "a schema (text or dict)" if name == "json" else "a string"
            raise ValueError(f"structured_outputs.{name} must be {kinds}, got {type(value).__name__}")
        for token in self.start_after:
            _check_int("structured_outputs.start_after entry", token, 0)


def _check_range(name: str, value: float, low: float, high: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value or abs(value) == math.inf:
        raise ValueError(f"{name} must be a finite number, got {quoted(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name} must be in [{low:g}, {high:g}], got {quoted(value)}")


def _check_int(name: str, value: Any, low: int, also: tuple[int, ...] = ()) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or (value < low and value not in also):
        choices = f"at least {low}" + "".join(f" or {extra}" for extra in also)
        raise ValueError(f"{name} must be an integer of {choices}, got {quoted(value)}")
    if value > MAX_INT:
        raise ValueError(f"{name} must be at most {MAX_INT}, got {quoted(value)}")


def _check_ids(name: str, values: Any) -> None:
    """Refuses entries that are no token ids. The check of a list of a million ids takes milliseconds."""
    if not isinstance(values, list):
        raise ValueError(f"{name} must be a list, got {quoted(values)}")
    if values and (set(map(type, values)) != {int} or min(values) < 0):
        for token in values:
            _check_int(f"{name} entry", token, 0)


def _as_list(name: str, value: Any) -> list[Any]:
    """Returns a string as a list of one, and a copy of any other iterable."""
    if value is None:
        return []
    if type(value) is list:
        return value.copy()
    if isinstance(value, str):
        return [value]
    if not isinstance(value, Iterable) or isinstance(value, (bytes, Mapping)):
        raise ValueError(f"{name} must be a list, got {quoted(value)}")
    return list(value)


def _as_biases(value: Any) -> dict[int, float]:
    """Returns the biases by token ids as integers; keys may be strings, as JSON has no others."""
    if not isinstance(value, Mapping):
        raise ValueError(f"logit_bias must map token ids to biases, got {quoted(value)}")
    try:
        return {int(token): bias for token, bias in value.items()}
    except (TypeError, ValueError):
        raise ValueError(f"logit_bias keys must be token ids, got {quoted(list(value))}") from None


#: Fields that must be numbers in a closed range: (field, lowest, highest).
_RANGES = (
    ("presence_penalty", -2.0, 2.0),
    ("frequency_penalty", -2.0, 2.0),
    ("repetition_penalty", MIN_REPETITION_PENALTY, 1e4),
    ("temperature", 0.0, 1e4),
    ("top_p", MIN_TOP_P, 1.0),
    ("min_p", 0.0, 1.0),
)


class _NamesFields(msgspec.StructMeta):
    """Raises `ValueError` with the nearest names, or all, where a keyword is none of the fields."""

    def __call__(cls, *values: Any, **fields: Any) -> Any:
        try:
            return super().__call__(*values, **fields)
        except TypeError:
            known = cls.__struct_fields__
            wrong = next((name for name in fields if name not in known), None)
            if wrong is None:
                raise
        hint = near(wrong, known) or f" (there are: {', '.join(known)})"
        raise ValueError(f"{cls.__name__} has no field {wrong!r}{hint}")


class SamplingParams(msgspec.Struct, metaclass=_NamesFields, omit_defaults=True, dict=True):
    """How the tokens of one request are drawn and when it ends. Raises `ValueError` naming the field and its range.

    A `temperature` below 1e-5 is greedy. `logprobs` k returns those of the k most likely tokens and the drawn one,
    -1 those of the whole vocabulary. `max_tokens` None allows as many as the model's length does.
    """

    n: int = 1
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    max_tokens: int | None = 16
    min_tokens: int = 0
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    flat_logprobs: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    logits_processors: list[Callable[..., Any]] | None = None
    truncate_prompt_tokens: int | None = None
    output_kind: RequestOutputKind = RequestOutputKind.CUMULATIVE
    structured_outputs: StructuredOutputsParams | None = None
    logit_bias: dict[int, float] | None = None
    allowed_token_ids: list[int] | None = None
    bad_words: list[str] | None = None
    extra_args: dict[str, Any] | None = None
    skip_clone: bool = False
    deterministic: bool = False
    #: The token ids of every spelling of every bad word; the front sets them at admission.
    bad_words_token_ids: list[list[int]] | None = None
    #: Special tokens that stay in the text for an output parser even with `skip_special_tokens`; the front sets them.
    kept_special_token_ids: list[int] | None = None

    def __post_init__(self) -> None:
        self._make_own()
        self.verify()

    def _make_own(self) -> None:
        """Replaces values by their one form, and lists by copies, so that a caller's changes do not reach them."""
        self.stop = _as_list("stop", self.stop)
        self.stop_token_ids = _as_list("stop_token_ids", self.stop_token_ids)
        self.bad_words = _as_list("bad_words", self.bad_words)
        if self.allowed_token_ids is not None:
            self.allowed_token_ids = _as_list("allowed_token_ids", self.allowed_token_ids)
        if self.logit_bias is not None:
            self.logit_bias = _as_biases(self.logit_bias)
        if self.seed == -1:
            self.seed = None
        if isinstance(self.temperature, float) and GREEDY_EPSILON <= self.temperature < MIN_TEMPERATURE:
            logger.warning(
                "temperature %g is raised to %g, below which logits overflow", self.temperature, MIN_TEMPERATURE
            )
            self.temperature = MIN_TEMPERATURE

    @classmethod
    def from_optional(cls, **values: Any) -> SamplingParams:
        """Makes parameters from keyword arguments, of which None means the default."""
        return cls(**{name: value for name, value in values.items() if value is not None})

    def verify(self) -> None:
        """Checks every field against its own range; raises `ValueError` naming the first that is out of it."""
        _check_int("n", self.n, 1)
        for name, low, high in _RANGES:
            value = getattr(self, name)
            if type(value) is not float or not low <= value <= high:  # what most are needs no call
                _check_range(name, value, low, high)
        _check_int("top_k", self.top_k, 0, also=(-1,))
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1)
        _check_int("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(f"min_tokens must be at most max_tokens {self.max_tokens}, got {self.min_tokens}")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, also=(-1,))
        if self.truncate_prompt_tokens is not None:
            _check_int("truncate_prompt_tokens", self.truncate_prompt_tokens, 1, also=(-1,))
        if self.seed is not None and not (type(self.seed) is int and -(2**63) <= self.seed < 2**64):
            raise ValueError(f"seed must be a 64-bit integer, got {quoted(self.seed)}")
        self._verify_stops()
        if self.structured_outputs is not None:
            given: Any = self.structured_outputs
            if not isinstance(given, StructuredOutputsParams):
                raise ValueError(f"structured_outputs must be StructuredOutputsParams, got {type(given).__name__}")
            self.structured_outputs.verify()
        for token, bias in (self.logit_bias or {}).items():
            _check_int("logit_bias key", token, 0)
            _check_range(f"logit_bias[{token}]", bias, -100.0, 100.0)

    def _verify_stops(self) -> None:
        for name in ("stop", "bad_words"):
            words: Sequence[Any] = getattr(self, name)
            if not isinstance(words, list) or (words and any(not isinstance(word, str) or not word for word in words)):
                raise ValueError(f"{name} must be a list of non-empty strings, got {quoted(words)}")
        for name in ("stop_token_ids", "allowed_token_ids"):
            ids = getattr(self, name)
            if ids:
                _check_ids(name, ids)
        for word in self.bad_words_token_ids or ():
            if not word:
                raise ValueError("bad_words_token_ids must hold no empty word")
            _check_ids("bad_words_token_ids", word)
        if self.allowed_token_ids is not None and not self.allowed_token_ids:
            raise ValueError("allowed_token_ids must name at least one token id, got []")
        if self.stop and not self.detokenize:
            raise ValueError("stop strings need detokenize=True, got detokenize=False")

    @property
    def greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < GREEDY_EPSILON

    def clone(self) -> SamplingParams:
        """Returns a copy for the engine to keep, which shares logits processors and `extra_args`; checks nothing."""
        if self.skip_clone:
            return self
        clone = copy(self)
        clone._make_own()
        return clone
