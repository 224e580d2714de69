"""Policies of tiers that are wrong in one way each."""

from __future__ import annotations

import random
from collections.abc import Container

from frame.plugins.tiers.lru import LruPolicy


class Grabbing(LruPolicy):
    """Names blocks that are in use."""

    def evict(self, incoming: bytes, kept: Container[bytes]) -> bytes | None:
        return super().evict(incoming, ())


class Clinging(LruPolicy):
    """Goes on naming blocks that were removed."""

    def remove(self, key: bytes) -> None:
        """Does nothing."""


class Fickle(LruPolicy):
    """Chooses by chance."""

    def evict(self, incoming: bytes, kept: Container[bytes]) -> bytes | None:
        if random.random() < 0.5 and self._order:
            self._order.move_to_end(next(iter(self._order)))
        return super().evict(incoming, kept)
