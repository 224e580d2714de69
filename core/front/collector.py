"""Holds the outputs of one request until its consumer takes them, in an asyncio front."""

from __future__ import annotations

import asyncio

from .outputs import RequestOutput


class Collector:
    """Holds at most one output of a request until its consumer takes it.

    A consumer that is slower than the engine gets the tokens of several steps in one output: `aggregate` joins deltas,
    otherwise a newer output replaces the older one.
    """

    def __init__(self, aggregate: bool) -> None:
        self._aggregate = aggregate
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, output: RequestOutput) -> None:
        """Adds an output; never blocks."""
        if self._output is None:
            self._output = output
        else:
            self._output.add(output, self._aggregate)
        self._wake()

    def fail(self, error: Exception) -> None:
        """Makes `get` raise `error` after it has returned the output that is waiting."""
        self._error = error
        self._wake()

    async def get(self) -> RequestOutput:
        """The next output; waits for it."""
        if self._output is None and self._error is None:
            if self._waiter is not None:
                raise RuntimeError("a request's outputs were taken by two consumers")
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        output, self._output = self._output, None
        if output is not None:
            return output
        raise self._error or RuntimeError("a request's outputs were taken by two consumers")

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
