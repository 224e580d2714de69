"""One step as data: what the scheduler asks for and what the worker answers.

It consists of plain arrays and structs, so that it can be sent to other processes. Knows no tensor and no text.
A *slot* is a request's stable index in the worker's state (0 .. max_num_seqs - 1); the scheduler hands slots out and
reuses one only after the last step that used it has been answered. Arrays are int32 unless said otherwise.
"""

from __future__ import annotations

import struct

import msgspec
import numpy as np

from .adapters import AdapterLoad
from .pooling_params import PoolingParams
from .sampling import SamplingParams

#: What `StepPlan.extras` calls the embeddings of a step's tokens, a `PromptEmbeds` whose places are of the step.
EMBEDS = "embeds"


class PrefixCosts(msgspec.Struct, frozen=True):
    """What a layer loses and saves when it reads a prefix once for rows that share it.

    The unit is the time in which a row alone reads one token. Each step that does it loses `launch`, and `tile` for
    each shared token and tile of `rows` rows. For each token that a row need not read it saves `few` with up to 4 rows,
    `some` with up to 16 and `many` with more: less for many, since what they read at one time comes from a cache.
    """

    launch: float
    rows: int = 16
    tile: float = 1.0
    few: float = 1.0
    some: float = 1.0
    many: float = 1.0

    def saved(self, num_rows: int, num_tokens: int) -> float:
        """Returns what is saved if `num_rows` rows share `num_tokens`, without `launch`; below 0 for a loss."""
        each = self.few if num_rows <= 4 else self.some if num_rows <= 16 else self.many
        return (num_rows * each - -(-num_rows // self.rows) * self.tile) * num_tokens


class NewRequest(msgspec.Struct, kw_only=True):
    """A request that enters a slot: newly admitted, or resumed after preemption (then prefill includes its output).

    `prompt_len` counts the user's prompt; `token_ids` [prefill_len] are the tokens to prefill now: the prompt and
    what was generated before a preemption. `num_computed` of them are already in the KV cache. `block_ids[g]`
    are the blocks of KV group g, in order. `seed` is never missing: drawn at admission when the caller gave none.
    A request with `pooling` yields a pooled row at the end of its prefill, and never a token. `adapter` is the slot of
    its adapter, 0 for none. The step that adds a request with `encoder_ids` runs the encoder on them.
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
    pooling: PoolingParams | None = None
    adapter: int = 0
    encoder_ids: np.ndarray | None = None


class BlockAppend(msgspec.Struct, kw_only=True):
    """Blocks that requests gained in KV group `group`, [n]: entry `offsets[i]` of slot `slots[i]` is `block_ids[i]`."""

    group: int
    slots: np.ndarray
    offsets: np.ndarray
    block_ids: np.ndarray


class BlockCopy(msgspec.Struct, kw_only=True):
    """In KV group `group` blocks `targets` [n] become what blocks `sources` [n] were before."""

    group: int
    sources: np.ndarray
    targets: np.ndarray


class PrefixRows(msgspec.Struct, kw_only=True):
    """Rows `rows` [n] of a step whose first `num_tokens` tokens are computed and lie in the same blocks."""

    rows: np.ndarray
    num_tokens: int


class StepPlan(msgspec.Struct, kw_only=True):
    """What one step does, in the order in which the worker applies it.

    `removed_slots` leave first (finished or preempted), `added` enter, `appends` extend block tables; then, for the B
    rows of the batch: `slots` [B], `num_scheduled` [B] tokens to compute, `num_computed` [B] tokens already in the
    cache (exact without drafts, else an upper bound), `samples` bool [B]: whether the row yields a token (its last
    prefill token is part of the step), `num_drafts` [B] draft tokens among the scheduled ones. A plan without rows
    still applies the state changes and lets connectors progress. `extras` carries one message per collaborator.
    `prefixes` are rows of one token that attend to the same first tokens, where reading those once is worth it.
    `adapters` are loaded before all else; `adapted` says whether some row has one. `copies` are made one after the
    other before the forward pass, also by a plan without rows. With `capture` the worker captures a CUDA graph of one
    more shape after this step; all ranks do so together.
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
    copies: list[BlockCopy] = []
    capture: bool = False
    adapters: list[AdapterLoad] = []
    adapted: bool = False
    extras: dict[str, bytes] = {}

    @property
    def num_tokens(self) -> int:
        """The number of tokens that the forward pass computes."""
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
        """Returns the masks as bytes, copied once: large vocabularies and batches make megabytes in each step."""
        slots = np.ascontiguousarray(self.slots, "<i4")
        words = np.ascontiguousarray(self.words, "<i4")
        return b"".join((struct.pack("<II", *words.shape), slots.data, words.data))

    @classmethod
    def unpacked(cls, data: bytes) -> TokenMasks:
        """Returns the masks in bytes of `packed`, as read-only views; raises `ValueError` for other bytes."""
        rows, width = struct.unpack_from("<II", data) if len(data) >= 8 else (0, 0)
        if len(data) != 8 + 4 * rows * (1 + width):
            raise ValueError(f"{len(data)} bytes are not the masks of {rows} rows of {width} words")
        slots = np.frombuffer(data, "<i4", rows, 8)
        words = np.frombuffer(data, "<i4", rows * width, 8 + 4 * rows)
        return cls(slots=slots, words=words.reshape(rows, width))


class TransferReport(msgspec.Struct, kw_only=True):
    """What a connector's worker side did in one step.

    `sent` and `received` are request ids whose asynchronous transfer ended; `given_up` are those whose load takes too
    long: they are computed in other blocks, while theirs stay out of use until the load is reported as received, or for
    ten minutes since a report named it last. `failed_blocks` are pairs (KV group, block
    id) whose content did not arrive: the scheduler recomputes from the first of them. `counters` are added to those of
    earlier steps, `gauges` replace them; the metrics show both as `frame_kv_connector_NAME`, NAME being lower-case
    letters, digits and "_". `events` reach the scheduler side once every rank gave an equal one ("stored"), `notes`,
    pairs (rank, data), as they come ("dropped").
    """

    sent: list[str] = []
    received: list[str] = []
    given_up: list[str] = []
    failed_blocks: list[tuple[int, int]] = []
    counters: dict[str, float] = {}
    gauges: dict[str, float] = {}
    events: list[bytes] = []
    notes: list[tuple[int, bytes]] = []


class ExpertReport(msgspec.Struct, frozen=True, kw_only=True):
    """What the balance of experts has done since the start; equal on all ranks that share experts.

    `balancedness` is the mean tokens of a rank over those of the fullest when experts were placed last, 1 before.
    `num_placements` counts decisions that moved experts, `num_copies` experts that went from one rank to another.
    """

    balancedness: float = 1.0
    num_placements: int = 0
    num_copies: int = 0


class StepResult(msgspec.Struct, kw_only=True):
    """What a step produced. Row order is that of the plan.

    `token_ids` [B, 1 + max drafts] (-1 where there is none), `num_tokens` [B] valid ones per row. `logprobs[row]` and
    `prompt_logprobs[row]` only for rows that asked. `failed[row]` names why a single row could not be sampled (for
    example non-finite logits); the other rows stand. `pooled[row]` float32 [rows, size] is what a pooling request gets
    whose prompt ended with this step. With a speculator, `num_drafts` [B] of each row were checked (of which
    `num_tokens - 1` held), and `num_next_drafts` [B] were proposed for its next step; else both are None. With
    `wants_capture` the worker has more shapes to capture (`StepPlan.capture`). `peers_busy`: this or another data rank
    had rows in the step, where ranks share experts. `experts` is given where it differs from that of the step before.
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
    wants_capture: bool = False
    peers_busy: bool = False
    experts: ExpertReport | None = None
