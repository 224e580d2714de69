"""A tier policy of any package, kept from doing harm: what it raises, or a block that may not go, ends its use.

Knows neither slots nor requests.
"""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Callable, Container, Sequence, Set

from frame.interfaces import TierPolicy, TierPolicySetup

logger = logging.getLogger("frame.connectors.offload")


class NothingHeld(TierPolicy):
    """For a tier that has no room for a block, so that no policy is asked."""

    def touch(self, keys: Sequence[bytes]) -> None:
        pass

    def insert(self, keys: Sequence[bytes]) -> None:
        pass

    def evict(self, incoming: bytes, kept: Container[bytes]) -> None:
        return None

    def remove(self, key: bytes) -> None:
        pass


class CheckedPolicy(TierPolicy):
    """Asks `policy`, named `name`, until it fails; from then on the one that `make_spare` makes.

    `held` are the keys that were inserted and are still held; its owner changes them after each call.
    """

    def __init__(
        self,
        setup: TierPolicySetup,
        policy: TierPolicy,
        name: str,
        held: Set[bytes],
        make_spare: Callable[[], TierPolicy],
    ) -> None:
        super().__init__(setup)
        self._policy = policy
        self._name: str | None = name  # None once it is no longer asked
        self._held = held
        self._make_spare = make_spare

    def touch(self, keys: Sequence[bytes]) -> None:
        try:
            self._policy.touch(keys)
        except Exception as error:  # of a plugin, which may raise anything
            self._replace("touch", error)
            self._policy.touch(keys)

    def insert(self, keys: Sequence[bytes]) -> None:
        try:
            self._policy.insert(keys)
        except Exception as error:
            self._replace("insert", error)
            self._policy.insert(keys)

    def evict(self, incoming: bytes, kept: Container[bytes]) -> bytes | None:
        try:
            key = self._policy.evict(incoming, kept)
            if key is None or (isinstance(key, bytes) and key in self._held and key not in kept):
                return key
            raise ValueError(f"{reprlib.repr(key)} is none of the blocks that are held and not in use")
        except Exception as error:
            self._replace("evict", error)
            return self._policy.evict(incoming, kept)

    def remove(self, key: bytes) -> None:
        try:
            self._policy.remove(key)
        except Exception as error:
            self._replace("remove", error)
            self._policy.remove(key)

    def _replace(self, method: str, error: Exception) -> None:
        """Has the spare one hold what is held. Raises `error` where that one has failed itself."""
        if self._name is None:
            raise error
        logger.error(
            "tier policy %r failed in %s, so the blocks unused for longest go from now on: %s: %s",
            self._name,
            method,
            type(error).__name__,
            " ".join(str(error).split()),  # a message may have several lines
        )
        logger.debug("where tier policy %r failed:", self._name, exc_info=error)
        self._name = None
        self._policy = self._make_spare()
        self._policy.insert(list(self._held))
