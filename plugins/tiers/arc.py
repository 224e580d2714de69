"""The adaptive replacement cache (Megiddo and Modha, "ARC: A Self-Tuning, Low Overhead Replacement Cache", FAST 2003).

Blocks that were used once and blocks that were used again are kept in two lists. Of each, the keys of blocks that went
are remembered for a while; one that comes back shows which list is too short. So a stream of prompts that never come
back does not push out those that do.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Any

from frame.interfaces import TierPolicy, TierPolicySetup


class ArcPolicy(TierPolicy):
    """See the module. `_target` is how many of the `num_blocks` are meant for blocks that were used once."""

    def __init__(self, setup: TierPolicySetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._num_blocks = setup.num_blocks
        self._target = 0
        self._once, self._again = OrderedDict[bytes, None](), OrderedDict[bytes, None]()  # oldest use first
        self._gone_once, self._gone_again = OrderedDict[bytes, None](), OrderedDict[bytes, None]()
        self._returning: dict[bytes, bool] = {}  # keys that came back and are not held yet: were they used again?

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._once:
                del self._once[key]
                self._again[key] = None
            elif key in self._again:
                self._again.move_to_end(key)

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._meet(key)
            known = self._returning.pop(key, None) is not None
            (self._again if known else self._once)[key] = None
        self._trim()

    def evict(self, incoming: bytes, kept: Container[bytes]) -> bytes | None:
        self._meet(incoming)
        shrinks = len(self._once) > self._target or (
            len(self._once) == self._target > 0 and self._returning.get(incoming, False)
        )
        lists = [(self._once, self._gone_once), (self._again, self._gone_again)]
        for held, gone in lists if shrinks else reversed(lists):
            victim = next((key for key in held if key not in kept), None)
            if victim is not None:
                del held[victim]
                gone[victim] = None
                self._trim()
                return victim
        return None

    def remove(self, key: bytes) -> None:
        for keys in (self._once, self._again, self._returning):
            keys.pop(key, None)

    def _meet(self, key: bytes) -> None:
        """Where a block that went comes back, moves the target towards the list that it went from."""
        once, again = len(self._gone_once), len(self._gone_again)
        if key in self._gone_once:
            del self._gone_once[key]
            self._target = min(self._num_blocks, self._target + max(1, again // once))
            self._returning[key] = False
        elif key in self._gone_again:
            del self._gone_again[key]
            self._target = max(0, self._target - max(1, once // again))
            self._returning[key] = True

    def _trim(self) -> None:
        """Forgets the oldest keys of blocks that went: once used at most `num_blocks`, all together twice that."""
        while self._gone_once and len(self._once) + len(self._gone_once) > self._num_blocks:
            self._gone_once.popitem(last=False)
        while self._gone_again and self._num_keys > 2 * self._num_blocks:
            self._gone_again.popitem(last=False)
        while len(self._returning) > self._num_blocks:
            del self._returning[next(iter(self._returning))]

    @property
    def _num_keys(self) -> int:
        return len(self._once) + len(self._again) + len(self._gone_once) + len(self._gone_again)
