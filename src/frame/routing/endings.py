"""What may end a request before its answer does: a client that leaves, and a front that stops."""

from __future__ import annotations

import asyncio
from types import TracebackType
from typing import Self

from starlette.types import Receive

from .bodies import ClientLeftError


class StoppedError(Exception):
    """The front stops and waits no longer for this request."""


class Ending:
    """A context for the work of a request, by the task that does it. `end` has it end with an exception.

    `watch` does that with `ClientLeftError` when the client disconnects; it is called once the body has been read.
    """

    def __init__(self) -> None:
        task = asyncio.current_task()
        if task is None:
            raise RuntimeError("requests are served in tasks")
        self._task = task
        self._reason: Exception | None = None
        self._watching: asyncio.Task[None] | None = None

    def end(self, reason: Exception) -> None:
        """Ends the work; without effect once it has a reason to end."""
        if self._reason is None:
            self._reason = reason
            self._task.cancel()

    def watch(self, receive: Receive) -> None:
        """Begins to look whether the client is still there."""
        self._watching = asyncio.create_task(self._watch(receive))

    async def _watch(self, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self.end(ClientLeftError())

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._watching is not None:
            self._watching.cancel()
        if isinstance(error, asyncio.CancelledError) and self._reason is not None:
            self._task.uncancel()
            raise self._reason from None
        self._reason = ClientLeftError()  # whoever comes later finds nothing to end
