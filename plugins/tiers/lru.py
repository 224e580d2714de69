"""Least recently used: the block that was used longest ago goes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Container, Sequence
from typing import Any

from frame.interfaces import TierPolicy, TierPolicySetup


class LruPolicy(TierPolicy):
    """See the module."""

    def __init__(self, setup: TierPolicySetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._order = OrderedDict[bytes, None]()  # the one that was used longest ago first

    def touch(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            if key in self._order:
                self._order.move_to_end(key)

    def insert(self, keys: Sequence[bytes]) -> None:
        for key in reversed(keys):
            self._order[key] = None

    def evict(self, incoming: bytes, kept: Container[bytes]) -> bytes | None:
        del incoming
        victim = next((key for key in self._order if key not in kept), None)
        if victim is not None:
            del self._order[victim]
        return victim

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)
