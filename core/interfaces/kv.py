"""What layers keep of each request, and how layers are grouped over pools of blocks.

Shared by the engine (which owns block ids), the worker (which owns the memory) and connectors. Knows no tensor.
A *block* is `block_size` consecutive tokens of one KV group, or the state of one request. Layers of a group share a
block table; groups share a pool: a block id of it stands for the same bytes in each layer slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}


class KVSpec(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What one layer keeps of a request. Layers of equal `retention` share a block table."""

    @property
    def retention(self) -> tuple[str, int]:
        """How tokens are kept, with the number of earlier ones that a token reads where that is bounded."""
        return "all", 0

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of one layer."""
        raise NotImplementedError

    def first_needed(self, position: int) -> int:
        """The earliest position that the token at `position` (and every later one) still reads."""
        del position
        return 0

    def max_live_blocks(self, block_size: int, num_tokens: int) -> int:
        """The most blocks that a request of `num_tokens` must hold at once, computed token by token."""
        return -(-num_tokens // block_size)


class FullKV(KVSpec, frozen=True, tag=True, kw_only=True):
    """Keys and values of `num_kv_heads` heads for each token, until the request ends.

    `context_ranks` share the tokens of a block: each has a block of as many tokens less.
    """

    num_kv_heads: int
    head_dim: int
    dtype: str
    context_ranks: int = 1

    def block_bytes(self, block_size: int) -> int:
        return 2 * block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype] // self.context_ranks


class SlidingKV(FullKV, frozen=True, tag=True, kw_only=True):
    """As `FullKV`, but a token reads itself and the `window - 1` before it; older blocks are given back."""

    window: int

    @property
    def retention(self) -> tuple[str, int]:
        return "window", self.window - 1

    def first_needed(self, position: int) -> int:
        return max(0, position - self.window + 1)

    def max_live_blocks(self, block_size: int, num_tokens: int) -> int:
        return min(-(-num_tokens // block_size), -(-(self.window - 1) // block_size) + 1)


class ChunkedKV(FullKV, frozen=True, tag=True, kw_only=True):
    """As `FullKV`, but a token reads those of its own run of `chunk` tokens alone; blocks of older runs go back."""

    chunk: int

    @property
    def retention(self) -> tuple[str, int]:
        return "chunk", self.chunk

    def first_needed(self, position: int) -> int:
        return position // self.chunk * self.chunk

    def max_live_blocks(self, block_size: int, num_tokens: int) -> int:
        return min(-(-num_tokens // block_size), -(-self.chunk // block_size) + 1)


class CrossKV(FullKV, frozen=True, tag=True, kw_only=True):
    """Keys and values of a request's encoder tokens, which are all there once its first step has run, and stay."""

    @property
    def retention(self) -> tuple[str, int]:
        return "encoder", 0


class LatentKV(KVSpec, frozen=True, tag=True, kw_only=True):
    """One vector of `dim` numbers for each token, which all heads share, and which every tensor rank keeps.

    `extra_bytes` hold what is kept of it in another type.
    """

    dim: int
    dtype: str
    extra_bytes: int = 0

    def block_bytes(self, block_size: int) -> int:
        return block_size * (self.dim * DTYPE_BYTES[self.dtype] + self.extra_bytes)


class StateKV(KVSpec, frozen=True, tag=True, kw_only=True):
    """A running state of `state_bytes` per request, whatever its length; one block holds the newest, in place."""

    state_bytes: int

    @property
    def retention(self) -> tuple[str, int]:
        return "state", 0

    def block_bytes(self, block_size: int) -> int:
        del block_size
        return self.state_bytes


AnyKVSpec = FullKV | SlidingKV | ChunkedKV | CrossKV | LatentKV | StateKV


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers of equal retention, which share a block table. `layers[i]` keeps `specs[i]` in layer slot i of the pool.

    A group of states has a pool of its own, where a request holds one block; its block size is the number of tokens of
    which a prefix whose state is kept is a multiple, 0 where none is.
    """

    specs: tuple[AnyKVSpec, ...]
    layers: tuple[str, ...]
    block_size: int
    pool: int = 0

    @property
    def keeps_states(self) -> bool:
        """Whether a request has one block of it, which is overwritten in place."""
        return isinstance(self.specs[0], StateKV)

    @property
    def keeps_encoded(self) -> bool:
        """Whether its blocks hold encoder tokens, so that their number does not grow with the request."""
        return isinstance(self.specs[0], CrossKV)

    def blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold the first `num_tokens` tokens of a request."""
        return 1 if self.keeps_states else -(-num_tokens // self.block_size)


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cache: groups over pools. `pools[p]` blocks are in pool p; block 0 of each is never handed out.

    Padding points at block 0. Block hashes are over `block_size` tokens, of which the block size of each group that
    keeps tokens is a multiple; a group uses every m-th hash. Prefix hits and connectors count in `grain` tokens, in
    which each of these groups has whole blocks. `numerics` names all that decides the bits in a block besides the
    tokens (weights without adapters, element types, backends and their formats, how work is divided over ranks);
    `model` names weights and element types only, and is equal however work is divided.
    """

    groups: tuple[KVGroup, ...]
    pools: tuple[int, ...]
    block_size: int
    grain: int
    numerics: str = ""
    model: str = ""

    def grain_blocks(self, tables: Sequence[Sequence[int]], index: int) -> list[list[int]]:
        """Of each group the block ids that hold grain number `index`; `tables[g]` are all those of a request.

        None of states, which stand for no grain alone.
        """
        found = []
        for table, group in zip(tables, self.groups, strict=True):
            count = 0 if group.keeps_states else self.grain // group.block_size
            found.append([int(block) for block in table[index * count : (index + 1) * count]])
        return found


KVRole = Literal["both", "producer", "consumer"]
