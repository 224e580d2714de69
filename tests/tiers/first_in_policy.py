"""A tier policy: first in, first out, whatever is used again."""

from collections.abc import Container, Sequence

from frame.interfaces import TierPolicy, TierPolicySetup


class FirstInPolicy(TierPolicy):
    """What was inserted first goes first."""

    def __init__(self, setup: TierPolicySetup, options: None = None) -> None:
        super().__init__(setup, options)
        self._order: dict[bytes, None] = {}

    def insert(self, keys: Sequence[bytes]) -> None:
        self._order.update(dict.fromkeys(reversed(keys)))

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def evict(self, incoming: bytes, kept: Container[bytes]) -> bytes | None:
        victim = next((key for key in self._order if key not in kept), None)
        if victim is not None:
            del self._order[victim]
        return victim

    def remove(self, key: bytes) -> None:
        self._order.pop(key, None)
