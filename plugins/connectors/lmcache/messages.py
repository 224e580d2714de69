"""What both sides of the lmcache connector share: how prompts are divided into chunks, and the message of a step.

A server hashes tokens in chunks of its own length. frame stores units: the fewest tokens that are whole grains of the
model's layout and whole chunks of the server. Knows no socket and no tensor.
"""

from __future__ import annotations

import math

import msgspec

from ..blocks.messages import BlockStep


class Geometry(msgspec.Struct, frozen=True, kw_only=True):
    """How this engine's blocks lie in objects of the server: `object_bytes` each, one for `chunk` tokens and a worker.

    `model` stands for the weights and for how blocks lie in memory on all `world` workers.
    """

    model: str
    chunk: int
    grain: int
    world: int
    object_bytes: int

    @property
    def unit(self) -> int:
        """The tokens of a unit."""
        return math.lcm(self.chunk, self.grain)

    @property
    def grains(self) -> int:
        """The grains of a unit."""
        return self.unit // self.grain

    @property
    def chunks(self) -> int:
        """The chunks, and so the objects of a worker, of a unit."""
        return self.unit // self.chunk


class Prompt(msgspec.Struct, frozen=True, kw_only=True):
    """The whole units of a prompt: its token ids as a msgpack array, and the hash of each unit's last grain.

    `session` is the name of its lookup at the server. `salt` stands for all that decides its blocks besides the tokens.
    """

    session: str
    salt: str
    unit: int
    tokens: bytes
    units: list[bytes]


class LMCacheStep(BlockStep, kw_only=True, omit_defaults=True):
    """`prompts` are those of requests that begin, or are loaded, in this step; None: no server is known yet."""

    geometry: Geometry | None = None
    prompts: dict[str, Prompt] = msgspec.field(default_factory=dict)
