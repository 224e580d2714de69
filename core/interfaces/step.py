"""One step as data: what the scheduler asks for and what the worker answers.

Plain arrays and structs, so that a step crosses processes as it is. Knows no tensor, no text and no policy.
A *slot* is a request's stable index in the worker's state (0 .. max_num_seqs - 1); the scheduler hands slots out and
reuses one only after the last step that used it has been answered. Arrays are int32 unless said otherwise.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np

from .pooling_params import PoolingParams
from .sampling import SamplingParams


class PrefixCosts(msgspec.Struct, frozen=True):
    """What it costs and saves a layer to read a prefix once for rows that share it, in tokens that a row reads alone.

    `launch` tokens are lost in each step that does it, and `tile` for each shared token and tile of `rows` rows. Of the
    tokens that rows no longer read `few` are saved by up to 4 rows, `some` by up to 16 and `many` by more: what many
    rows read at the same time comes from a cache.
    """

    launch: float
    rows: int = 16
    tile: float = 1.0
    few: float = 1.0
    some: float = 1.0
    many: float = 1.0

    def saved(self, num_rows: int, num_tokens: int) -> float:
        """Tokens saved where so many rows share `num_tokens`, without `launch`; below 0 where it would cost."""
        each = self.few if num_rows <= 4 else self.some if num_rows <= 16 else self.many
        return (num_rows * each - -(-num_rows // self.rows) * self.tile) * num_tokens


class NewRequest(msgspec.Struct, kw_only=True):
    """A request that enters a slot: newly admitted, or resumed after preemption (then prefill includes its output).

    `prompt_len` counts the user's prompt; `token_ids` [prefill_len] are the tokens to prefill now: the prompt and
    whatever was generated before a preemption. `num_computed` of them are already in the KV cache. `block_ids[g]`
    are the blocks of KV group g, in order. `seed` is never missing: drawn at admission when the caller gave none.
    A request with `pooling` yields a pooled row at the end of its prefill, and never a token.
    """

    slot: int
    request_id: str
    token_ids: np.ndarray
    prompt_len: int
    num_computed: int
    block_ids: list[np.ndarray]
    params: SamplingParams
    seed: int
    eos_token_ids: list[int] = []
    adapter: int = 0
    pooling: PoolingParams | None = None
    extras: dict[str, bytes] = {}


class BlockAppend(msgspec.Struct, kw_only=True):
    """Blocks that running requests gained in KV group `group`: `block_ids` [n] go to (`slots` [n], `offsets` [n])."""

    group: int
    slots: np.ndarray
    offsets: np.ndarray
    block_ids: np.ndarray


class PrefixRows(msgspec.Struct, kw_only=True):
    """Rows `rows` [n] of a step whose first `num_tokens` tokens lie in the same blocks, and are all computed."""

    rows: np.ndarray
    num_tokens: int


class StepPlan(msgspec.Struct, kw_only=True):
    """What one step does, in the order in which the worker applies it.

    `removed_slots` leave first (finished or preempted), `added` enter, `appends` extend block tables; then, for the
    B rows of the batch: `slots` [B], `num_scheduled` [B] tokens to compute, `num_computed` [B] tokens already in the
    cache (exact without drafts, else an upper bound), `samples` bool [B]: whether the row yields a token (its last
    prefill token is part of the step), `num_drafts` [B] draft tokens among the scheduled ones. A plan without rows
    still applies the state changes and lets connectors progress. `extras` carries one message per collaborator.
    `prefixes` are rows of one token that attend to the same first tokens, where reading those once is worth it.
    `capture` asks the worker to record one more shape after this step, so that all ranks do so together.
    """

    step: int
    removed_slots: np.ndarray
    added: list[NewRequest]
    appends: list[BlockAppend]
    slots: np.ndarray
    num_scheduled: np.ndarray
    num_computed: np.ndarray
    samples: np.ndarray
    num_drafts: np.ndarray
    finished_ids: list[str] = []
    deterministic: bool = False
    prefixes: list[PrefixRows] = []
    capture: bool = False
    extras: dict[str, bytes] = {}

    @property
    def num_tokens(self) -> int:
        """Tokens that the forward pass computes."""
        return int(np.add.reduce(self.num_scheduled))


class LogprobRows(msgspec.Struct, kw_only=True):
    """Log-probabilities of n positions: `token_ids` and float32 `logprobs` [n, k+1], column 0 the token itself.

    `ranks` [n] is 1 for the most likely token. Columns past a row's own k are token id -1.
    """

    token_ids: np.ndarray
    logprobs: np.ndarray
    ranks: np.ndarray


class TokenMasks(msgspec.Struct, kw_only=True):
    """Grammar masks of one step: bit v % 32 of `words[i, v // 32]` says whether slot `slots[i]` may draw token v.

    `words` int32 [n, ceil(vocab_size / 32)]. Slots that are not listed may draw anything.
    """

    slots: np.ndarray
    words: np.ndarray

    def packed(self) -> bytes:
        """As bytes, copied once: of a large vocabulary and batch there are megabytes in each step."""
        slots = np.ascontiguousarray(self.slots, "<i4")
        words = np.ascontiguousarray(self.words, "<i4")
        return b"".join((struct.pack("<II", *words.shape), slots.data, words.data))

    @classmethod
    def unpacked(cls, data: bytes) -> TokenMasks:
        """Read-only views of what `packed` gave; raises `ValueError` when it is something else."""
        rows, width = struct.unpack_from("<II", data) if len(data) >= 8 else (0, 0)
        if len(data) != 8 + 4 * rows * (1 + width):
            raise ValueError(f"{len(data)} bytes are not the masks of {rows} rows of {width} words")
        slots = np.frombuffer(data, "<i4", rows, 8)
        words = np.frombuffer(data, "<i4", rows * width, 8 + 4 * rows)
        return cls(slots=slots, words=words.reshape(rows, width))


class TransferReport(msgspec.Struct, kw_only=True):
    """What a connector's worker side did in one step.

    `sent` and `received` are request ids whose asynchronous transfer ended; `failed_blocks` are pairs (KV group, block
    id) whose content did not arrive: the scheduler recomputes from the first of them. `counters` are added to what was
    counted, `gauges` replace what was told; the metrics show both as `frame_kv_connector_NAME`, NAME being lower-case
    letters, digits and "_". `events` reach the scheduler side once every rank gave an equal one ("stored"), `notes`,
    pairs (rank, data), as they come ("dropped").
    """

    sent: list[str] = []
    received: list[str] = []
    failed_blocks: list[tuple[int, int]] = []
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    events: list[bytes] = []
    notes: list[tuple[int, bytes]] = []


class StepResult(msgspec.Struct, kw_only=True):
    """What a step produced. Row order is that of the plan.

    `token_ids` [B, 1 + max drafts] (-1 where there is none), `num_tokens` [B] valid ones per row. `logprobs[row]` and
    `prompt_logprobs[row]` only for rows that asked. `failed[row]` names why a single row could not be sampled (for
    example non-finite logits); the other rows stand. `pooled[row]` float32 [rows, size] is what a pooling request gets
    whose prompt ended with this step. With a speculator, `num_drafts` [B] of each row were checked (of which
    `num_tokens - 1` held), and `num_next_drafts` [B] were proposed for its next step; else both are None. `records`:
    the worker has more shapes to record (`StepPlan.capture`).
    """

    step: int
    token_ids: np.ndarray
    num_tokens: np.ndarray
    logprobs: dict[int, LogprobRows] = {}
    prompt_logprobs: dict[int, LogprobRows] = {}
    failed: dict[int, str] = {}
    pooled: dict[int, np.ndarray] = {}
    num_drafts: np.ndarray | None = None
    num_next_drafts: np.ndarray | None = None
    transfer: TransferReport | None = None
    records: bool = False
    extras: dict[str, bytes] = {}
