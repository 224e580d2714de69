"""What layers keep per token, and how layers are grouped over one pool of blocks.

Shared by the engine (which owns block ids), the worker (which owns the memory) and connectors. Knows no tensor.
A *block* is `block_size` consecutive tokens of one KV group. Layers of one group share a block table; groups share
the pool: every block id stands for the same number of bytes in each layer slot.
"""

from __future__ import annotations

from typing import Literal

import msgspec

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float8_e4m3fn": 1, "float8_e5m2": 1, "int8": 1, "uint8": 1}


class KVSpec(msgspec.Struct, frozen=True, tag=True, kw_only=True):
    """What one attention layer keeps for each token; the subclasses differ in how long a token is kept."""

    num_kv_heads: int
    head_dim: int
    dtype: str

    def block_bytes(self, block_size: int) -> int:
        """Bytes of one block of one layer: keys and values of `block_size` tokens."""
        return 2 * block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]

    def first_needed(self, position: int) -> int:
        """The earliest position that the token at `position` (and every later one) still attends to."""
        del position
        return 0


class FullKV(KVSpec, frozen=True, tag=True, kw_only=True):
    """Every token is kept until the request ends."""


class SlidingKV(KVSpec, frozen=True, tag=True, kw_only=True):
    """A token attends to itself and the `window - 1` before it; older blocks are given back."""

    window: int

    def first_needed(self, position: int) -> int:
        return max(0, position - self.window + 1)


class ChunkedKV(KVSpec, frozen=True, tag=True, kw_only=True):
    """A token attends within its own chunk of `chunk` tokens."""

    chunk: int

    def first_needed(self, position: int) -> int:
        return position // self.chunk * self.chunk


class LatentKV(KVSpec, frozen=True, tag=True, kw_only=True):
    """Multi-head latent attention: one latent vector of `head_dim` per token, no separate value."""

    def block_bytes(self, block_size: int) -> int:
        return block_size * self.num_kv_heads * self.head_dim * DTYPE_BYTES[self.dtype]


class StateKV(KVSpec, frozen=True, tag=True, kw_only=True):
    """State-space layers: `state_bytes` per request, whatever its length; one block holds the newest state."""

    state_bytes: int

    def block_bytes(self, block_size: int) -> int:
        del block_size
        return self.state_bytes

    def first_needed(self, position: int) -> int:
        return position


class CrossKV(KVSpec, frozen=True, tag=True, kw_only=True):
    """Keys and values of the encoder's output: as many tokens as the encoder saw, written once."""


AnyKVSpec = FullKV | SlidingKV | ChunkedKV | LatentKV | StateKV | CrossKV


class KVGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Layers that share a block table. `layers[i]` uses layer slot i of the pool."""

    spec: AnyKVSpec
    layers: tuple[str, ...]
    block_size: int


class KVLayout(msgspec.Struct, frozen=True, kw_only=True):
    """The whole cache: groups over one pool of `num_blocks` blocks (block 0 is never handed out; padding points at it).

    `page_bytes` is the size of one block in one layer slot, `num_slots` the layer slots (the most layers of a group).
    `numerics` names all that decides the bits in a block besides the tokens (weights without adapters, dtype, backend
    and its layout of a block, deterministic mode); it is part of block hashes and of connector keys.
    """

    groups: tuple[KVGroup, ...]
    num_blocks: int
    page_bytes: int
    num_slots: int
    numerics: str = ""

    @property
    def block_size(self) -> int:
        """Tokens in a block; the same for every group."""
        return self.groups[0].block_size if self.groups else 1


KVRole = Literal["both", "producer", "consumer"]
