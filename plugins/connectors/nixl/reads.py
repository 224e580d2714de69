"""Reads of another worker's memory that the agent has begun, or will. Knows no request."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from frame.interfaces import Mark

from .maps import LayerRows
from .messages import AgentFacts


@dataclass
class Read:
    """For load number `load`, reads the memory of another worker that `rows` gives, called in the agent's thread.

    Begins once `mark` is passed: before that, steps that were launched may still use the blocks. The other worker gets
    `notice` when all was read.
    """

    load: int
    peer: AgentFacts
    rows: Callable[[], Sequence[LayerRows]]
    notice: bytes
    deadline: float
    mark: Mark
    handle: Any = None
    copy: Mark | None = None  # of a read past NIXL
    begun: float = 0.0  # when it was launched
    copied: bool = False  # it went past NIXL and is over, and the other worker must be told
    awaited_until: float = 0.0  # when nobody waits for it any more, if NIXL reads
    given_up: bool = False  # it goes on, and nobody waits for it
    failed_at: float | None = None  # when NIXL said that it failed; it may not be released yet

    @property
    def has_begun(self) -> bool:
        """Whether this worker's blocks may be written to."""
        return self.handle is not None or self.copy is not None


def told(reads: Sequence[Read]) -> str:
    """Says of reads that have begun which one has gone on for the longest time."""
    longest = min(reads, key=lambda read: read.begun)
    others = f", and {len(reads) - 1} more do" if len(reads) > 1 else ""
    return f"a read from {longest.peer.name} has gone on for {time.monotonic() - longest.begun:.0f} s{others}"
