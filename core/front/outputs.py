"""What a caller gets back: `RequestOutput` and the `CompletionOutput`s in it, `PoolingRequestOutput`. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np

from ..interfaces.engine import Fault, FinishReason
from .logprobs import PromptLogprobs, SampleLogprobs

T = TypeVar("T")


@dataclass(slots=True)
class RequestMetrics:
    """Times of a request in seconds of `time.time`, None where not reached yet; and its draft counts.

    Drafts were checked `num_drafts` times, in all `num_draft_tokens` tokens, of which `num_accepted_tokens` were
    accepted.
    """

    arrival_time: float
    first_scheduled_time: float | None = None
    first_token_time: float | None = None
    last_token_time: float | None = None
    finished_time: float | None = None
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0

    def count_drafts(self, num_drafts: int, num_accepted: int) -> None:
        """Adds the drafts that one step checked for one sequence."""
        self.num_drafts += 1
        self.num_draft_tokens += num_drafts
        self.num_accepted_tokens += num_accepted

    @property
    def mean_acceptance_length(self) -> float:
        """Mean number of tokens of a step with drafts: the accepted ones, and the one drawn after them."""
        return 1 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


@dataclass
class CompletionOutput:
    """One output sequence of a request.

    `stop_reason` is the stop string or stop token id that ended it; None for the end-of-sequence token and for length.
    `cumulative_logprob` is known when log-probabilities were asked for. `error` says why finish_reason is "error", and
    `fault` whether the request, the load or the engine is to blame.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: SampleLogprobs | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    lora_request: Any = None
    routed_experts: Any = None
    error: str | None = None
    fault: Fault = "engine"

    def finished(self) -> bool:
        return self.finish_reason is not None

    def _extend(self, later: CompletionOutput) -> None:
        self.text += later.text
        self.token_ids = [*self.token_ids, *later.token_ids]
        if later.logprobs:
            if self.logprobs is None:
                self.logprobs = later.logprobs
            else:
                self.logprobs.extend(later.logprobs)  # type: ignore[arg-type]
        self.cumulative_logprob = later.cumulative_logprob
        self.finish_reason, self.stop_reason = later.finish_reason, later.stop_reason
        self.error, self.fault = later.error, later.fault


@dataclass
class RequestOutput:
    """A request's prompt and its outputs so far, ordered by index.

    `num_cached_tokens` counts the prompt tokens whose keys and values were found in the prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int] | None
    prompt_logprobs: PromptLogprobs | None
    outputs: list[CompletionOutput]
    finished: bool
    metrics: RequestMetrics | None = None
    lora_request: Any = None
    encoder_prompt: str | None = None
    encoder_prompt_token_ids: list[int] | None = None
    num_cached_tokens: int | None = None
    kv_transfer_params: dict[str, Any] | None = field(default=None, kw_only=True)

    def add(self, next_output: RequestOutput, aggregate: bool = True) -> None:
        """Merges a later output of the same request: deltas are joined (`aggregate`), else the later one replaces."""
        self.finished |= next_output.finished
        self.kv_transfer_params = next_output.kv_transfer_params or self.kv_transfer_params
        self.metrics = next_output.metrics or self.metrics
        if self.prompt_logprobs is None:
            self.prompt_logprobs = next_output.prompt_logprobs
        if self.num_cached_tokens is None:
            self.num_cached_tokens = next_output.num_cached_tokens
        positions = {completion.index: position for position, completion in enumerate(self.outputs)}
        for completion in next_output.outputs:
            position = positions.get(completion.index)
            if position is None:
                self.outputs.append(completion)
            elif aggregate:
                self.outputs[position]._extend(completion)
            else:
                self.outputs[position] = completion
        self.outputs.sort(key=lambda completion: completion.index)


def quick(kind: type[T], **fields: Any) -> T:
    """An output from its fields, made faster than by a call of its class: each token of a stream needs one.

    A field that is left out has its default, because dataclass defaults are class attributes.
    """
    output = kind.__new__(kind)
    output.__dict__ = fields
    return output


@dataclass
class PoolingOutput:
    """float32 `data`: [size], or [rows, size] with a row for each token. `error`: why pooling failed."""

    data: np.ndarray
    error: str | None = None
    fault: Fault = "engine"


@dataclass
class PoolingRequestOutput(Generic[T]):
    """The answer to one prompt."""

    request_id: str
    outputs: T
    prompt_token_ids: list[int]
    num_cached_tokens: int | None = None
    finished: bool = True
