"""Which of several engines a request belongs to before it is sent: where it was lost, or where its session is."""

from __future__ import annotations

from typing import Generic, TypeVar

E = TypeVar("E")

#: Requests whose engine is remembered; those that nobody wants any more do not come again.
MOST = 1 << 16


class Homes(Generic[E]):
    """The engines of requests by id, of the newest `MOST`."""

    def __init__(self) -> None:
        self._engines: dict[str, E] = {}

    def note(self, request_id: str, engine: E) -> None:
        """Remembers the engine of a request."""
        self._engines[request_id] = engine
        while len(self._engines) > MOST:
            del self._engines[next(iter(self._engines))]

    def take(self, request_id: str | None) -> E | None:
        """The engine of a request, which is then forgotten; None where it has none."""
        return self._engines.pop(request_id or "", None)
