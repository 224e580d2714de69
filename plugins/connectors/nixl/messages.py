"""What the sides of the nixl connector tell one another, in one engine and between engines. Knows no socket."""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import numpy as np

from ..blocks.mapped_memory import Offer
from .maps import Piece
from .shapes import MAX_LAYERS, Facts, RankShape

#: What arrives later than this before its lease ends counts as not arrived.
MARGIN_SECONDS = 1.0
#: Most bytes of what a NIXL agent says of itself.
MAX_METADATA = 1 << 19
#: Most block ids of one request, over all KV groups.
MAX_BLOCKS = 65_536
TICKET_BYTES = 16
_NUMBERS = struct.Struct("<II")


class LayerMemory(msgspec.Struct, frozen=True, array_like=True):
    """Where a layer's blocks lie: `count` of them, `size` bytes each, the next one `stride` bytes further."""

    address: int
    size: int
    device: int
    stride: int
    count: int


class AgentFacts(msgspec.Struct, frozen=True):
    """A worker's NIXL agent, as another engine's worker needs it to read its layers' blocks.

    `metadata` must be given to NIXL only if it came from a peer that knows the secret: NIXL does not check it.
    """

    name: str
    metadata: bytes
    memory: Literal["DRAM", "VRAM"]
    layers: list[LayerMemory]
    offer: Offer | None = None

    def __post_init__(self) -> None:
        if len(self.metadata) > MAX_METADATA or len(self.layers) > MAX_LAYERS or len(self.name) > 256:
            raise ValueError("an agent says more of itself than it may")


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker tells its engine: the machine whose clock it reads, how its blocks lie in memory, its agent.

    `buffered`: the agent reaches host memory, to which blocks must be copied before others read them.
    """

    machine: str
    shape: RankShape
    agent: AgentFacts
    buffered: bool = False


class Fit(msgspec.Struct, frozen=True):
    """What another engine is, and the `pieces` of it that each rank of this one reads."""

    theirs: Facts
    pieces: list[list[Piece]]


class Load(msgspec.Struct, frozen=True):
    """Blocks of another engine, of which `fit` is the encoded `Fit`, that the workers read for the request `owner`.

    Of an engine's loads no two have the same `number`: a later request may have the id of one whose read still goes on.
    They hold tokens `start` to before `stop`. `ours[g]` are those of group g here, from the first of these tokens on;
    `blocks[g]` are those of the other engine's group g, from the one with the first token on. 0: needed by nobody. The
    lease of `ticket` ends at `deadline` of this machine's clock.
    """

    number: int
    owner: str
    agents: list[AgentFacts]
    fit: bytes
    ticket: bytes
    start: int
    stop: int
    ours: list[list[int]]
    blocks: list[list[int]]
    deadline: float


class Notice(NamedTuple):
    """What a reader tells the rank that it has read from: it is one of `num_readers` of a lease."""

    ticket: bytes
    reader: int
    num_readers: int

    def packed(self) -> bytes:
        """As bytes, of which the first are the ticket."""
        return self.ticket + _NUMBERS.pack(self.reader, self.num_readers)

    @classmethod
    def of(cls, data: bytes) -> Notice | None:
        """That of bytes that anybody may have sent; None where they are none."""
        if len(data) != TICKET_BYTES + _NUMBERS.size:
            return None
        return cls(data[:TICKET_BYTES], *_NUMBERS.unpack(data[TICKET_BYTES:]))


class NixlStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The scheduler side's message: loads that begin, later ends of leases by load, whether others may read here.

    `given` are blocks that others may read once they are in host memory, by the request whose they are.
    """

    loads: list[Load] = []
    given: dict[str, list[list[int]]] = {}
    deadlines: dict[int, float] = {}
    holds: bool = False


class NixlNote(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker's word to the scheduler side: notices that came, owners of loads that failed, its agent if it is new.

    `given` are the requests of a step's `given` whose blocks may be read now.
    """

    notices: list[bytes] = []
    given: list[str] = []
    failed: list[str] = []
    facts: WorkerFacts | None = None


def digest(content: bytes, token_ids: Sequence[int]) -> bytes:
    """Stands for a prompt's beginning and all else that its blocks depend on."""
    tokens = np.asarray(token_ids, "<i4").tobytes()
    return hashlib.sha256(b"frame nixl" + len(content).to_bytes(8, "little") + content + tokens).digest()


def machine() -> str:
    """Names the clock that `time.monotonic` reads: processes with equal names may compare their times."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()} {os.readlink('/proc/self/ns/time')}"
