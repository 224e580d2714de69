"""An attention backend: where keys and values lie in a block, and how queries attend to them.

One backend object serves the layers of a KV group that ask for the same. Per step it makes a plan from the batch, then
each of those layers calls `forward` with that plan. Knows no request and no model.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from .step import PrefixCosts

if TYPE_CHECKING:
    from ..ops import Ops
    from .setup import BackendSetup

AttentionKind = Literal["decoder", "encoder_only", "encoder", "cross"]


@dataclass(frozen=True)
class ContextShare:
    """Which tokens of each row a cache holds: those at positions rank, rank + ranks, rank + 2 * ranks and so on.

    Each block has a part on every rank, so that block tables, block hashes and what the engine hands out are equal on
    all of them. Token n of those that are held lies in the row's block n // `block_size` of the spec.
    """

    ranks: int = 1
    rank: int = 0

    def held(self, num_tokens: Any) -> Any:
        """How many of a row's first `num_tokens` are held: an integer, an array or a tensor."""
        return (num_tokens - self.rank + self.ranks - 1) // self.ranks

    def slots(self, slot_mapping: Tensor) -> Tensor:
        """The slots in this cache of what a batch's `slot_mapping` says; -1 for tokens that another rank holds."""
        mine = (slot_mapping >= 0) & (slot_mapping % self.ranks == self.rank)
        return torch.where(mine, slot_mapping // self.ranks, -1)


@dataclass(frozen=True)
class AttentionSpec:
    """What a layer asks of a backend.

    `window` > 0 limits a token to itself and the `window - 1` before it, and in an encoder as many behind it;
    `chunk` > 0 limits it to those of its run of so many: a backend is given rows that begin with such a run, so that it
    need not heed it. `soft_cap` > 0 is tanh capping of scores; `sinks` says that each head has a learned sink logit,
    `alibi` that each head has a slope, `distances` N > 0 that it has a bias for each distance up to N. With the kinds
    "encoder_only" and "encoder" a row attends to all of its tokens in the step, with "cross" to all of its `seq_lens`
    cached tokens, which an encoder gave: the E keys and values of a step go to the E slots of its batch before that.
    `kv_dtype` is the cache's element type, `block_size` the tokens of a block: 0 until the cache is planned.

    With `returns_lse`, `forward` gives the log-sum-exp of the scores too, so that parts of a context can be merged.
    `context` says which tokens of a row the cache holds; `window`, a multiple of its ranks, and all that a batch says
    of lengths are of the whole row, `block_size` is of what the cache holds: a block of the batch stands for
    `context.ranks` times as many tokens. Sinks and slopes are never asked for together with a share of the context.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    dtype: torch.dtype
    kv_dtype: torch.dtype
    block_size: int
    device_type: str
    kind: AttentionKind = "decoder"
    window: int = 0
    chunk: int = 0
    soft_cap: float = 0.0
    sinks: bool = False
    alibi: bool = False
    distances: int = 0
    deterministic: bool = False
    returns_lse: bool = False
    context: ContextShare = ContextShare()


@dataclass
class SharedPrefix:
    """Rows of one token each whose tables begin with the same blocks, in tiles of at most N; all int32.

    N is the backend's `prefix_tile_rows`. `tile_rows` [tiles, N] are rows of the batch (-1: none), `tile_lens` [tiles]
    the tokens that they share (0: an unused tile) and `row_lens` [B] the same by row. All shared tokens were in the
    cache before this step. Only the device knows the values, so that a captured step holds for any; the host knows the
    sizes.
    """

    tile_rows: Tensor
    tile_lens: Tensor
    row_lens: Tensor


@dataclass
class GroupBatch:
    """The rows of one step for one KV group. T tokens, B rows (possibly padded), all int32 unless said otherwise.

    `query_start` [B+1]: row i owns tokens query_start[i] .. query_start[i+1]. `seq_lens` [B]: tokens in the cache
    after this step (0 for padding rows). `block_table` [B, max_blocks]; entries before the window, behind a row's last
    token, and of padding rows may be anything and must not be read. `slot_mapping` int64 [T]: block * block_size +
    offset where each token's key and value go, -1 for padding. `host_query_lens`, `host_seq_lens` [B]: the same on the
    host (`host_seq_lens` an upper bound unless `exact_lens`, as drafts may be in flight), `max_query_len` and
    `max_seq_len` the most of any row, or what the step's shape pads that to. A backend may make use of `prefix`: which
    tokens of rows are the same.

    For a group of states `block_table` is [B, 1], the block of each row's state, and `slot_mapping` says nothing but
    which tokens are padding. A row whose `seq_lens` are its query tokens begins: its block holds another's state.
    """

    num_tokens: int
    query_start: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    host_query_lens: np.ndarray
    host_seq_lens: np.ndarray
    max_query_len: int
    max_seq_len: int
    deterministic: bool = False
    prefix: SharedPrefix | None = None
    exact_lens: bool = False


@dataclass(frozen=True)
class BlockFormat:
    """How one block of a layer lies in memory, in one piece, and how a backend sees all blocks of it.

    `shape` are the axes of a block, `order` these axes as they lie in memory, outermost first. In the tensor that the
    backend gets the axis of blocks stands at `block_axis`. `head_axis` is the axis of `shape` for KV heads,
    `token_axis` that for tokens; None where they have none of their own. Raises `ValueError` for what cannot be.
    """

    shape: tuple[int, ...]
    order: tuple[int, ...]
    dtype: torch.dtype
    block_axis: int = 0
    head_axis: int | None = None
    token_axis: int | None = None

    def __post_init__(self) -> None:
        if sorted(self.order) != list(range(len(self.shape))):
            raise ValueError(f"order {self.order} is not a permutation of the {len(self.shape)} axes of {self.shape}")
        if not 0 <= self.block_axis <= len(self.shape):
            raise ValueError(f"block_axis must be in [0, {len(self.shape)}], got {self.block_axis}")
        if not all(0 <= (axis or 0) < len(self.shape) for axis in (self.head_axis, self.token_axis)):
            axes = f"{self.head_axis} and {self.token_axis}"
            raise ValueError(f"head_axis and token_axis must be in [0, {len(self.shape) - 1}], got {axes}")

    @property
    def num_bytes(self) -> int:
        """Bytes of a block."""
        return math.prod(self.shape) * self.dtype.itemsize

    def view(self, memory: Tensor) -> Tensor:
        """The elements of `memory` uint8 [num_blocks, at least num_bytes] by their axes, without a copy."""
        blocks = memory.narrow(1, 0, self.num_bytes).view(self.dtype).unflatten(1, [self.shape[i] for i in self.order])
        by_meaning = blocks.permute(0, *(1 + self.order.index(axis) for axis in range(len(self.shape))))
        seen: Tensor = by_meaning.movedim(0, self.block_axis)
        return seen


@dataclass(frozen=True)
class LayerParams:
    """What differs between layers of a group besides their weights: the spec, and per-head and per-layer constants.

    A cache of 8-bit floats holds keys and values divided by `key_scale` and `value_scale`: numbers or, for backends
    with `takes_head_scales`, float32 [num_kv_heads] at addresses that do not change, while what is there may.
    `distance_bias` [num_heads, 2 N + 1] is added to scores: of a key d tokens behind a query it is that of column
    N + d, from the first column, for all -N and further before it, to the last.
    """

    spec: AttentionSpec
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None
    key_scale: float | Tensor = 1.0
    value_scale: float | Tensor = 1.0
    distance_bias: Tensor | None = None


class CacheBackend(ABC):
    """Serves layers that ask for one by a spec. Built as `Class(setup, options)`, once for each KV group and spec.

    Steps of one token a row may be captured as CUDA graphs. `plan` and the layers then run once, with the host lengths
    of the longest rows that can be and without padding; a replay launches the same kernels for other rows, which they
    read from device tensors at the same addresses. `needs_python` says that this would be wrong. Steps with prompts are
    captured but for attention, maybe by a step of padding with such lengths and more tokens than rows.
    """

    #: the specs that it is asked about
    spec_type: ClassVar[type] = AttentionSpec
    spec: Any
    #: whether `plan` reads the batch's `prefix`; only then is one computed
    shares_prefixes: bool = False
    #: what that costs and saves; with None rows share prefixes only from the length on that a user sets
    prefix_costs: PrefixCosts | None = None
    #: rows that attend to a shared prefix as one tile: with 4 query heads for each KV head, 16 of them have the 64 rows
    #: of a Hopper matrix instruction. Backends of one engine that share prefixes must agree, or none are shared.
    prefix_tile_rows: int = 16
    #: whether single-token steps need `plan` or the layers' work each time, so that none is captured. A backend that
    #: says False copies nothing to the host, and decides on the host nothing that shorter rows or padding would make
    #: wrong.
    needs_python: bool = True

    def __init__(self, setup: BackendSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.spec = setup.spec
        self.ops: Ops = setup.ops

    @classmethod
    @abstractmethod
    def supports(cls, spec: Any) -> str | None:
        """None, or every reason why this backend cannot serve such a layer, joined by "; ". Never raises.

        Its `block_size` is a multiple of what `block_multiple` says, unless the user asked for another one.
        """

    @classmethod
    def preference(cls, spec: Any) -> int | None:
        """How well this backend suits `spec`, against other backends; None takes the provider's own number."""
        del spec
        return None

    @classmethod
    def block_multiple(cls, spec: Any) -> int:
        """Blocks of such layers are of a multiple of so many tokens, whatever `spec.block_size` is."""
        del spec
        return 1

    @classmethod
    @abstractmethod
    def kv_format(cls, spec: Any) -> BlockFormat:
        """How a block of one layer lies in memory: `spec.block_size` tokens, in as many bytes as its KV spec says."""

    @abstractmethod
    def plan(self, batch: GroupBatch) -> Any:
        """Prepares a step for the layers of a group that ask for `spec`, once, before any of them runs."""


class AttentionBackend(CacheBackend):
    """Serves `frame.layers` attention, over a paged cache or of a row over itself."""

    spec: AttentionSpec
    #: whether `forward` takes a scale of the cache for each KV head; for others the layer multiplies by them itself
    takes_head_scales: ClassVar[bool] = False

    @classmethod
    def kv_format(cls, spec: AttentionSpec) -> BlockFormat:
        """By default keys, then values, each [block_size, num_kv_heads, head_dim].

        `forward` then gets a cache of [2, num_blocks, block_size, num_kv_heads, head_dim].
        """
        shape = (2, spec.block_size, spec.num_kv_heads, spec.head_dim)
        return BlockFormat(shape, (0, 1, 2, 3), spec.kv_dtype, block_axis=1, head_axis=2, token_axis=1)

    @abstractmethod
    def forward(
        self, layer: LayerParams, query: Tensor, key: Tensor, value: Tensor, kv_cache: Tensor, plan: Any
    ) -> Tensor | tuple[Tensor, Tensor]:
        """Stores `key`, `value` [T, num_kv_heads, head_dim] at the plan's slots, then attends.

        `query` [T, num_heads, head_dim], `kv_cache` as `kv_format` views it. Returns [T, num_heads, head_dim]; rows of
        padding tokens are unspecified but finite. Where the spec says `returns_lse`, it returns that and the natural
        logarithm of the sum of the exponentiated scores, float32 [T, num_heads]: -inf, with zeros as the output, for a
        query that sees no token that is held.
        """
