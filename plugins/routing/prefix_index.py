"""Which servers have which beginnings of prompts. Knows neither tokens nor texts, only keys of blocks.

A key stands for all of a prompt up to the end of a block, so that prompts share a key exactly where they are equal so
far. Keys are numbers of this process.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import repeat


class PrefixIndex:
    """Holders are bits: 1, 2, 4, …. Reading needs no lock beside the one thread that changes it."""

    def __init__(self) -> None:
        self._holders: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._holders)

    def add(self, key: int, bit: int) -> None:
        """The holder has the block."""
        self._holders[key] = self._holders.get(key, 0) | bit

    def remove(self, key: int, bit: int) -> None:
        """The holder has the block no more, if it had it."""
        left = self._holders.get(key, 0) & ~bit
        if left:
            self._holders[key] = left
        else:
            self._holders.pop(key, None)

    def depths(self, runs: Iterable[Sequence[int]], holders: int) -> dict[int, int]:
        """How many of the first blocks each of these holders has without a gap.

        `runs` are the keys in their order, in pieces that are read as far as anyone has all of them.
        """
        found: dict[int, int] = {}
        depth = 0
        for run in runs:
            if not holders:
                break
            if all(mask & holders == holders for mask in set(map(self._holders.get, run, repeat(0)))):  # few differ
                depth += len(run)
                continue
            for mask in map(self._holders.get, run, repeat(0)):
                if lost := holders & ~mask:
                    found |= dict.fromkeys(bits(lost), depth)
                    holders &= mask
                depth += 1
        return found | dict.fromkeys(bits(holders), depth)


def bits(mask: int) -> list[int]:
    """The bits of a mask."""
    found = []
    while mask:
        lowest = mask & -mask
        found.append(lowest)
        mask ^= lowest
    return found


class Bits:
    """Gives each holder a bit of its own, and a bit that was given back to the next one."""

    def __init__(self) -> None:
        self._taken = 0

    def take(self) -> int:
        """The lowest that is free."""
        bit = ~self._taken & (self._taken + 1)
        self._taken |= bit
        return bit

    def give_back(self, bit: int) -> None:
        """Nobody has it any more."""
        self._taken &= ~bit
