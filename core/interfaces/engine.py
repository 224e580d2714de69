"""What crosses between the front (text) and the engine (ids): requests in, tokens out."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from .pooling_params import PoolingParams
from .sampling import SamplingParams
from .step import LogprobRows

FinishReason = Literal["stop", "length", "abort", "error"]
Fault = Literal["request", "load", "engine", "lost"]


class EngineRequest(msgspec.Struct, kw_only=True):
    """A request as the engine sees it: ids only, one output sequence.

    `seed` is drawn by the front when the caller gave none. `eos_token_ids` end the output unless `ignore_eos`;
    `max_tokens` is final (never None). `owner` is whose it is, for policies that share out. `salt`, `adapter_name`
    and `media_keys` enter the block hashes. A `replayed` request was let in by an earlier engine; it carries what
    it had already emitted in `output_ids`, and at how many positions of the prompt log-probabilities were reported.
    With `pooling` it ends with its prefill, and its only output is `EngineOutput.pooled`.
    """

    request_id: str
    prompt_ids: np.ndarray
    params: SamplingParams
    max_tokens: int
    seed: int
    eos_token_ids: list[int] = []
    arrival: float = 0.0
    priority: int = 0
    owner: str = ""
    salt: str | None = None
    adapter_name: str | None = None
    media_keys: list[str] = []
    replayed: bool = False
    output_ids: list[int] = []
    num_prompt_logprobs: int = 0
    pooling: PoolingParams | None = None
    kv_transfer: dict[str, Any] | None = None


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added to one request. `stop_reason` is the stop token id, None for EOS or length.

    `num_cached` (first output only) counts prompt tokens taken from the prefix cache or a connector, and `scheduled` is
    when the request left the queue for the first time, in seconds of `time.time`. `num_drafts` were checked in this
    step, of which the first `num_accepted` held. `fault` says where an `error` lies: the request could never have run,
    the engine has too much to do, something broke, or the engine is gone and the request may be replayed on the next
    one. `pooled` float32 [rows, size] is the whole answer of a pooling request.
    """

    request_id: str
    token_ids: list[int] = []
    logprobs: LogprobRows | None = None
    prompt_logprobs: LogprobRows | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    fault: Fault = "engine"
    num_cached: int | None = None
    scheduled: float | None = None
    pooled: np.ndarray | None = None
    num_drafts: int = 0
    num_accepted: int = 0
    kv_transfer: dict[str, Any] | None = None


class EngineStats(msgspec.Struct, kw_only=True):
    """Counters and gauges of one engine since its start; times in seconds.

    `prefix_queries` and `prefix_hits` count prompt tokens looked up and found. `step_seconds` is the host and device
    time of the newest step that computed tokens, 0 where no request is unfinished, `busy_seconds` that of all
    together. `num_drafts` times a request's drafts were checked, together `num_draft_tokens`, of which
    `num_accepted_tokens` held; `num_accepted_per_place` says how many did at each place after the last known token.
    `connector_counters` and `connector_gauges` are what the KV connector's workers reported, by their names.
    """

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    num_blocks: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    steps: int = 0
    step_seconds: float = 0.0
    busy_seconds: float = 0.0
    finished: dict[str, int] = {}
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    num_accepted_per_place: list[int] = []
    connector_counters: dict[str, float] = {}
    connector_gauges: dict[str, float] = {}
