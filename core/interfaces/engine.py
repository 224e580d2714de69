"""What crosses between the front, which knows text, and the engine, which knows token ids: requests and outputs."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
import numpy as np

from .adapters import AdapterSource
from .pooling_params import PoolingParams
from .sampling import SamplingParams
from .step import LogprobRows

#: The id of a token that is given by its embedding alone.
NO_TOKEN = -1

#: Most bytes of the embeddings of a prompt, and of those of a step.
MAX_EMBEDS_BYTES = 1 << 27

FinishReason = Literal["stop", "length", "abort", "error"]
Fault = Literal["request", "load", "engine", "lost"]


class PromptEmbeds(msgspec.Struct, kw_only=True):
    """Rows that stand where a prompt's tokens would be embedded.

    `rows` float32 [n, embed_size] lie, in order, at `places` int32 [n] of the prompt, whose ids there are NO_TOKEN.
    """

    rows: np.ndarray
    places: np.ndarray

    def between(self, start: int, end: int) -> PromptEmbeds:
        """Those of the places `start` .. `end` - 1, as views."""
        first, last = np.searchsorted(self.places, (start, end)).tolist()
        return PromptEmbeds(rows=self.rows[first:last], places=self.places[first:last])


class EngineRequest(msgspec.Struct, kw_only=True):
    """A request as the engine sees it: ids only, one output sequence.

    `seed` is drawn by the front when the caller gave none. `eos_token_ids` end the output unless `ignore_eos`.
    `arrival` is in seconds of `time.time`. `owner` names whose request it is, for scheduling policies that divide the
    engine among owners. `salt`, the content of `adapter` and `media_keys` enter the block hashes. A `replayed` request
    was admitted by an earlier engine: `output_ids` are the tokens that it had emitted, and `num_prompt_logprobs` the
    positions of the prompt whose log-probabilities it had reported. With `pooling` it ends with its prefill, and its
    only output is `EngineOutput.pooled`. `embeds` are the embeddings of tokens that have no id. A request of a session
    `follows` the one of that id ("" for the first), whose tokens but the last its prompt begins with: the engine keeps
    the blocks of one for the next, while there is room and until `end_session` names the last. `encoder_ids` int32 [n]
    are what the model's encoder reads; the decoder begins with `prompt_ids`. They enter the block hashes as well.
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
    adapter: AdapterSource | None = None
    media_keys: list[str] = []
    replayed: bool = False
    output_ids: list[int] = []
    num_prompt_logprobs: int = 0
    pooling: PoolingParams | None = None
    kv_transfer: dict[str, Any] | None = None
    embeds: PromptEmbeds | None = None
    follows: str | None = None
    encoder_ids: np.ndarray | None = None


class EngineOutput(msgspec.Struct, kw_only=True, omit_defaults=True):
    """What one step added to one request.

    `stop_reason` is the stop token's id, None for an end token or a length. The first output has `num_cached`, prompt
    tokens that came from the prefix cache or a connector, and `scheduled`, when the request first left the queue, in
    seconds of `time.time`. The step checked `num_drafts` draft tokens, and the first `num_accepted` of them were right.
    `fault` says what an `error` means: the request could never run ("request"), the engine has too much to do ("load"),
    something broke ("engine"), or the engine is gone and the next one may be sent the request ("lost"). `pooled`
    float32 [rows, size] is the answer to a pooling request.
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

    `kv_usage` is the share of KV blocks in use, 0 to 1. `prefix_queries` counts prompt tokens that were looked up in
    the prefix cache, `prefix_hits` those that were found. `step_seconds` is the host and device time of the newest step
    that computed tokens, 0 while no request is unfinished; `busy_seconds` is that of all steps. Drafts of requests were
    checked `num_drafts` times: `num_draft_tokens` tokens, of which `num_accepted_tokens` were right;
    `num_accepted_per_place` counts these by their place after the last known token. `finished` counts requests by
    finish reason. `connector_counters` and `connector_gauges` are what the KV connector's workers reported, by name. Of
    each adapter, by its name, `adapters_running` and `adapters_waiting` count the requests now, and `adapters_added`
    all since it was loaded. `num_kv_events` were accepted for subscribers, others dropped. The numbers of experts are
    those of an `ExpertReport`, of all engines that share experts. Of several engines (data ranks) they are the sums,
    and `ranks` has those of each: its `rank`, and in `problem` why it does not serve, None where it does; an engine
    that does not answer counts with its last ones.
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
    expert_balancedness: float = 1.0
    num_expert_placements: int = 0
    num_expert_copies: int = 0
    num_kv_events: int = 0
    num_kv_events_dropped: int = 0
    adapters_running: dict[str, int] = {}
    adapters_waiting: dict[str, int] = {}
    adapters_added: dict[str, int] = {}
    rank: int = 0
    problem: str | None = None
    ranks: list[EngineStats] = []
