"""Prompts whose blocks other engines send to a worker, and who sends them. Knows no frame and no device."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

import numpy as np
from torch import Tensor

from ..blocks.host_arena import Arena
from .messages import State


@dataclass(eq=False)
class Sender:
    """Who is at the other end, `where`, of a connection; with `session` it writes to this worker's memory itself.

    `scratch` is where it is to prove that. `begun` are the prompts that it may be writing, by digest.
    """

    connection: socket.socket
    session: str
    where: str
    scratch: Tensor | None = None
    begun: dict[bytes, Prompt] = field(default_factory=dict)


@dataclass(eq=False)
class Prompt:
    """The blocks of a prompt; `parts[l]` uint8 [n, block bytes] of layer l, from place `firsts[l]` on.

    `there[l]` [n] says which have come, from `source`, which writes them itself where there is a `session`. Its
    `memory`, of `arena`, stays while `users` read or write it.
    """

    digest: bytes
    source: Sender
    session: str
    arena: Arena
    memory: Tensor
    firsts: list[int]
    parts: list[Tensor]
    there: list[np.ndarray]
    deadline: float
    arrived: bool = False
    gone: bool = False
    users: int = 0

    @property
    def whole(self) -> bool:
        """Whether all blocks have come."""
        return all(one.all() for one in self.there)


@dataclass(eq=False)
class Waiting:
    """A prompt for which there was no room, and whose `source` asks again; `unwanted` if it is to be told that."""

    source: Sender
    deadline: float = 0.0
    unwanted: bool = False


@dataclass(frozen=True)
class Row:
    """The blocks of a layer: of which KV group, and how many bytes each has."""

    group: int
    num_bytes: int


@dataclass
class Counts:
    """What came since the worker last asked."""

    num_bytes: int = 0
    events: dict[bytes, State] = field(default_factory=dict)
