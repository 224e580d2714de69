"""What the sides of the nixl connector tell one another, in one engine and between engines. Knows no socket."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from typing import Literal

import msgspec
import numpy as np

from frame.interfaces import KVLayout, Mesh, encode

VERSION = 1
#: What arrives later than this before its lease ends counts as not arrived.
MARGIN_SECONDS = 1.0
#: Most layers of a rank, and bytes of what a NIXL agent says of itself.
MAX_LAYERS, MAX_METADATA = 4096, 1 << 19
#: Most block ids of one request, over all KV groups.
MAX_BLOCKS = 65_536


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

    def __post_init__(self) -> None:
        if len(self.metadata) > MAX_METADATA or len(self.layers) > MAX_LAYERS or len(self.name) > 256:
            raise ValueError("an agent says more of itself than it may")


class WorkerFacts(msgspec.Struct, frozen=True):
    """What a worker tells its engine: the machine whose clock it reads, how its blocks lie in memory, its agent."""

    machine: str
    formats: str
    agent: AgentFacts


class Facts(msgspec.Struct, frozen=True):
    """What must be equal in two engines that exchange blocks; compared before anything else is read."""

    version: int
    model: str
    grain: int
    groups: str
    tensor: int
    pipeline: int
    formats: list[str]

    @classmethod
    def of(cls, layout: KVLayout, mesh: Mesh, formats: Sequence[str]) -> Facts:
        """Those of an engine; `formats` are its workers', by rank."""
        groups = hashlib.sha256(encode(layout.groups)).hexdigest()
        return cls(VERSION, layout.model, layout.grain, groups, mesh.tensor, mesh.pipeline, list(formats))

    def difference(self, other: Facts) -> str | None:
        """The first thing in which `other` differs, in words; None where nothing does."""
        words = {
            "version": "the version of the protocol",
            "model": "the model",
            "grain": "the block size",
            "groups": "what layers keep",
            "tensor": "tensor_parallel_size",
            "pipeline": "pipeline_parallel_size",
            "formats": "the format of blocks (attention backend or element type)",
        }
        return next((text for name, text in words.items() if getattr(self, name) != getattr(other, name)), None)


class Load(msgspec.Struct, frozen=True):
    """Blocks that each worker reads from the same rank of another engine: `theirs[g][i]` into `ours[g][i]`.

    The lease ends at `deadline` of this machine's clock; `notice` is told to the other side when all was read.
    """

    owner: str
    agents: list[AgentFacts]
    notice: bytes
    ours: list[list[int]]
    theirs: list[list[int]]
    deadline: float


class NixlStep(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The scheduler side's message: loads that begin, later ends of leases by owner, whether others may read here."""

    loads: list[Load] = []
    deadlines: dict[str, float] = {}
    holds: bool = False


class NixlNote(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A worker's word to the scheduler side: notices that came, owners of loads that failed, its agent if it is new."""

    notices: list[bytes] = []
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
