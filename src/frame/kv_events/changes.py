"""What a listener learns of a server's prefix cache: which blocks can be found there, as KV events tell it.

Only blocks that decide how far a prompt's beginning is cached are told: those of layers that attend to all tokens.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

#: How a server names a block: a number, or bytes. Names of two servers, or of two starts of one, say nothing together.
BlockName: TypeAlias = int | bytes


class KVStored(NamedTuple):
    """Blocks can be found, each behind the one before it, the first behind `parent`, None at a prompt's beginning.

    `tokens` are the ids in all of them, `block_size` in each; both are empty where the server told of these blocks
    before, in another `medium`. `adapter` is the adapter's name. `extra` has, for each block, what decides its content
    besides (salts, media, embeddings); it is empty where nothing does in any.
    """

    names: Sequence[BlockName]
    parent: BlockName | None
    tokens: array[int]
    block_size: int
    adapter: str | None = None
    extra: Sequence[tuple[str, ...]] = ()
    medium: str = ""


class KVRemoved(NamedTuple):
    """Blocks can no longer be found in `medium`."""

    names: Sequence[BlockName]
    medium: str = ""


class KVCleared(NamedTuple):
    """Nothing can be found, or it is no longer known what."""


KVChange: TypeAlias = KVStored | KVRemoved | KVCleared
