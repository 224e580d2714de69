"""What workers and the keeper of their weights say. A connection carries one question and its answer."""

from __future__ import annotations

import msgspec

#: Open files in one message of the kernel's; it takes 253 at most.
FILES_AT_ONCE = 128
#: Bytes of a message: a table of a million tensors is larger than any model's.
MAX_BYTES = 64 << 20
#: Most pieces of the weights of one worker.
MAX_PIECES = 1 << 14


class Ask(msgspec.Struct, tag=True, frozen=True):
    """Worker to keeper: give me the weights of `rank` if they have this key; if not, give their memory back."""

    rank: int
    key: str


class Keep(msgspec.Struct, tag=True, frozen=True):
    """Worker to keeper: keep these, in place of what was kept of `rank`; files of `sizes` bytes of memory follow."""

    rank: int
    key: str
    table: bytes
    sizes: list[int]


class Suspend(msgspec.Struct, tag=True, frozen=True):
    """Worker to keeper: the weights of `rank` are about to change; nobody may have them until `Renew`."""

    rank: int


class Renew(msgspec.Struct, tag=True, frozen=True):
    """Worker to keeper: they have changed, and this is their key and table now."""

    rank: int
    key: str
    table: bytes


class Drop(msgspec.Struct, tag=True, frozen=True):
    """Worker to keeper: give the memory of `rank` back."""

    rank: int


class Kept(msgspec.Struct, tag=True, frozen=True):
    """Keeper to worker: the answer to each; to `Ask` what was found, empty if nothing was; its files follow.

    `other` says that what was kept had another key, or was half changed, and is given back.
    """

    table: bytes = b""
    sizes: list[int] = []
    other: bool = False


ToKeeper = Ask | Keep | Suspend | Renew | Drop
