"""The policy of a tier: which of its blocks go when another needs room. Knows no memory, no request and no model."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Container, Sequence
from dataclasses import dataclass
from typing import Any

from frame.core.interfaces.setup import Setup


@dataclass(frozen=True, kw_only=True)
class TierPolicySetup(Setup):
    """For `TierPolicy`: the most blocks that its tier holds."""

    num_blocks: int


class TierPolicy(ABC):
    """Orders the blocks that a tier holds, by their keys. Built as `Class(setup, options)`; called from one thread.

    Keys stand for content: one that went may come back, and a policy may remember it, but no more than a few times
    `num_blocks` keys. What it answers depends on the calls alone.
    """

    def __init__(self, setup: TierPolicySetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @abstractmethod
    def touch(self, keys: Sequence[bytes]) -> None:
        """Blocks that are held are used again; `keys` are those of one prompt, from its beginning on.

        A block is of use only with those before it, so the first should stay longest.
        """

    @abstractmethod
    def insert(self, keys: Sequence[bytes]) -> None:
        """Blocks of one prompt are held from now on, from its beginning on. None of them was."""

    @abstractmethod
    def evict(self, incoming: bytes, kept: Container[bytes]) -> bytes | None:
        """Chooses a block that goes, so that the block `incoming` has room; it is held no longer.

        None where all that are held are in `kept`, which are in use. `incoming` may be inserted later, or never.
        """

    @abstractmethod
    def remove(self, key: bytes) -> None:
        """A block is held no longer, or was not stored after all; keys that are not held are ignored."""
