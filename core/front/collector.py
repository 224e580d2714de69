"""Hands the outputs of one request to its asyncio consumer. Knows no engine."""

from __future__ import annotations

import asyncio

from .outputs import RequestOutput


class Collector:
    """Holds at most one output: a consumer slower than the engine gets several steps in one.

    `aggregate` joins deltas; otherwise a newer output replaces the older one.
    """

    def __init__(self, aggregate: bool) -> None:
        self._aggregate = aggregate
        self._output: RequestOutput | None = None
        self._error: Exception | None = None
        self._ready = asyncio.Event()

    def put(self, output: RequestOutput) -> None:
        """Adds an output; never blocks."""
        if self._output is None:
            self._output = output
        else:
            self._output.add(output, self._aggregate)
        self._ready.set()

    def fail(self, error: Exception) -> None:
        """Makes `get` raise once what was put has been taken."""
        self._error = error
        self._ready.set()

    async def get(self) -> RequestOutput:
        """The next output; waits for it."""
        await self._ready.wait()
        output, self._output = self._output, None
        if self._error is None:
            self._ready.clear()
        elif output is None:
            raise self._error
        if output is None:
            raise RuntimeError("a request's outputs were taken by two consumers")
        return output
