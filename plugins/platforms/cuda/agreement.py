"""What the workers of an engine decide alike: each measures on its own device, and their steps must not differ."""

from __future__ import annotations

import msgspec

from frame.interfaces import HostGroup, SingleHost


class Agreement:
    """Decisions over the workers of `host`, all of which make the same calls in the same order."""

    def __init__(self, host: HostGroup | None = None) -> None:
        self._host = host or SingleHost()

    def most(self, number: int) -> int:
        """The largest number that a worker gave."""
        return max(msgspec.json.decode(data, type=int) for data in self._host.gather(b"%d" % number))

    def first(self, data: bytes) -> bytes:
        """What the first worker gave."""
        return self._host.gather(data)[0]
