"""The asyncio client of an engine process: `EngineClient`.

`RemoteEngine` talks to the engine that it is attached to and reports which requests were lost when that engine dies.
Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from typing import Any

import msgspec
import numpy as np

from frame.links.greeting import RefusedError

from ..interfaces.client import EngineDeadError, EngineInfo
from ..interfaces.engine import EngineOutput, EngineRequest, EngineStats, Fault
from ..interfaces.wire import decode, encode
from .channel import AsyncChannel
from .messages import (
    LAST_WORDS_SECONDS,
    Abort,
    Add,
    Call,
    ClientNews,
    EngineDown,
    EngineUp,
    FromEngine,
    Hello,
    Outputs,
    Reply,
)
from .output_queue import OutputQueue

logger = logging.getLogger("frame.server")

_NO_IDS = np.zeros(0, np.int32)
_RECONNECT_SECONDS = 0.1
#: When the connection breaks more often than this within so many seconds, the running requests end, since one of them
#: may cause it.
_MAX_BREAKS = 3
_BREAKS_SECONDS = 30.0


class RemoteEngine:
    """An engine in another process. Every request gets an end, since unfinished ones are tracked.

    The supervisor calls `news` with the engine's address and when the engine is gone; `close` also runs `on_close` (the
    owner of the process). Engines that share `outputs` have one consumer. `key` lets in at engines of other machines.
    """

    def __init__(self, outputs: OutputQueue | None = None, key: bytes = b"") -> None:
        self.on_close: Callable[[], Awaitable[None]] | None = None
        self._name, self._key = secrets.token_hex(8), key
        self._info: EngineInfo | None = None
        self._channel: AsyncChannel | None = None
        self._reader: asyncio.Task[None] | None = None
        self._outputs = outputs or OutputQueue()
        self._unfinished: dict[str, None] = {}  # sent to this engine, in this order
        self._waiting: set[str] = set()  # ids that the next engine gets
        self._up = asyncio.Event()  # set while an engine listens, or once none will be started
        self._silent = asyncio.Event()  # set while there is no connection to read
        self._silent.set()
        self._final = self._closed = False
        self._calls: dict[int, asyncio.Future[bytes]] = {}
        self._ids = itertools.count()
        self._error: str | None = "the engine is starting"

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine; raises `EngineDeadError` before the first one was ready."""
        if self._info is None:
            raise EngineDeadError(self._error or "there is no engine")
        return self._info

    @property
    def ready(self) -> bool:
        """Whether an engine was ready once."""
        return self._info is not None

    @property
    def error(self) -> str | None:
        """None while the engine serves, else why it does not."""
        return self._error

    @property
    def end(self) -> str | None:
        """Why no engine will be started any more; None while one serves or is starting."""
        return self._error if self._final else None

    async def news(self, message: ClientNews) -> None:
        """Handles a supervisor's message: attaches to a new engine, detaches from a dead one."""
        if isinstance(message, EngineUp):
            if self._closed:  # while the supervisor started another engine
                return
            self._final = False
            await self._stop_reading()
            self._info = message.info
            await self._connect(message)
            self._reader = asyncio.create_task(self._follow(message))
        elif isinstance(message, EngineDown):
            ending = "" if message.final else "; it is being started again"
            with contextlib.suppress(TimeoutError):  # the last messages of a dead engine are still in the socket
                async with asyncio.timeout(LAST_WORDS_SECONDS):
                    await self._silent.wait()
            if not self._final:  # still attached to that engine
                fault: Fault = "engine" if message.final and not message.away else "lost"
                await self._detach(f"{message.error}{ending}", message.final, fault)

    async def add(self, request: EngineRequest) -> None:
        """Sends a request; waits while the engine restarts.

        Raises `EngineDeadError` when none will be started, `ValueError` for a request that cannot be encoded.
        """
        name = request.request_id
        self._waiting.add(name)
        try:
            while not self._up.is_set():  # the new engine may be gone again before this task runs
                await self._up.wait()
            if name not in self._waiting:
                return  # aborted meanwhile
        finally:
            self._waiting.discard(name)
        channel = self._connected()
        self._unfinished[name] = None
        try:
            _check_readable(request)
            await channel.send(Add(request))
        except OSError:
            return  # the reader sees the broken connection too and reports this request as lost
        except (OverflowError, TypeError, ValueError) as error:  # a field has a value that cannot be encoded
            self._unfinished.pop(name, None)
            raise ValueError(f"the request cannot be sent to the engine: {error}") from None

    def keeps(self, request_id: str) -> bool:
        """Whether a request waits here for the next engine; aborted now, it gets no output."""
        return request_id in self._waiting

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; unknown ids are ignored."""
        request_ids = list(request_ids)
        self._waiting.difference_update(request_ids)
        wanted = [request_id for request_id in request_ids if request_id in self._unfinished]
        if wanted and self._channel is not None:
            with contextlib.suppress(OSError):  # the reader ends them all
                await self._channel.send(Abort(wanted))

    def outputs(self) -> AsyncIterator[list[EngineOutput]]:
        """Everything the engine emits, in order, for one consumer; ends when the client is closed.

        Outputs of several steps that wait for the consumer come as one batch.
        """
        return self._outputs.read()

    async def stats(self) -> EngineStats:
        """Counters and gauges now; raises `EngineDeadError`."""
        stats: EngineStats = await self._call("stats", None, EngineStats)
        return stats

    async def call(self, method: str, arguments: dict[str, Any] | None = None) -> Any:
        """Like `Engine.call`; raises `RuntimeError` with the engine's error."""
        return await self._call(method, arguments, Any)

    async def close(self) -> None:
        """Ends the connection, and the engine process when this client started it. May be called twice."""
        await self.drop("the engine was shut down")
        self._outputs.close()
        if self.on_close is not None:
            await self.on_close()

    def _connected(self) -> AsyncChannel:
        if self._channel is None or self._error is not None:
            raise EngineDeadError(self._error or "there is no engine")
        return self._channel

    async def _call(self, method: str, arguments: dict[str, Any] | None, kind: Any) -> Any:
        channel = self._connected()
        number = next(self._ids)
        future = self._calls[number] = asyncio.get_running_loop().create_future()
        try:
            await channel.send(Call(number, method, arguments))
            return decode(await future, kind)
        except OSError:
            raise EngineDeadError(self._error or "the engine process is gone") from None
        finally:
            del self._calls[number]

    async def drop(self, error: str) -> None:
        """Detaches from the engine for ever and ends every unfinished request with `error`."""
        self._closed = True
        await self._detach(error, True, "engine")

    async def _detach(self, error: str, final: bool, fault: Fault) -> None:
        await self._stop_reading()
        self._final = final
        self._on_disconnect(error, fault)
        if final:
            self._up.set()

    async def _stop_reading(self) -> None:
        if self._reader is not None:
            self._reader.cancel()
            await asyncio.gather(self._reader, return_exceptions=True)
            self._reader = None

    async def _connect(self, engine: EngineUp) -> None:
        try:
            channel = await AsyncChannel.connect(engine.address, FromEngine, self._key)
            await channel.send(Hello(self._name))
        except (OSError, RefusedError) as error:
            reason = getattr(error, "strerror", None) or error
            self._on_disconnect(f"no engine process listens ({reason})", "lost")
            return
        self._channel = channel
        self._error = None
        self._silent.clear()
        self._up.set()

    async def _follow(self, engine: EngineUp) -> None:
        """Handles the engine's messages until this task is cancelled, and reconnects when a connection ends.

        Requests lost with a connection are reported as if the engine had died; when connections break too often, they
        end with an error.
        """
        breaks: list[float] = []
        while True:
            if self._channel is not None:
                error, fault = await self._read(self._channel)
                now = time.monotonic()
                breaks = [moment for moment in breaks if now - moment < _BREAKS_SECONDS] + [now]
                self._on_disconnect(error, "engine" if len(breaks) > _MAX_BREAKS else fault)
            await asyncio.sleep(_RECONNECT_SECONDS)  # if the engine is dead, the supervisor's message cancels this task
            await self._connect(engine)

    async def _read(self, channel: AsyncChannel) -> tuple[str, Fault]:
        """Handles messages until the connection ends; returns why, and the fault of the requests that were lost."""
        try:
            while (message := await channel.receive()) is not None:
                self._take(message)
        except OSError as error:
            logger.warning("the connection to the engine broke: %s", error)
        except ValueError as error:
            # the request of the unreadable answer is unknown, so all end; the engine drops them when the connection
            # ends
            logger.exception("an answer of the engine cannot be read; connecting again")
            return f"an answer of the engine cannot be read: {error}", "engine"
        return "the engine process is gone", "lost"

    def _on_disconnect(self, error: str, fault: Fault) -> None:
        """Ends all calls and requests that wait for an engine that will not answer over this connection."""
        self._error = error
        self._up.clear()
        self._silent.set()
        if self._channel is not None:
            self._channel.close()
            self._channel = None
        lost = [
            EngineOutput(request_id=name, finish_reason="error", error=error, fault=fault) for name in self._unfinished
        ]
        self._unfinished.clear()
        if lost:
            self._outputs.put_apart(lost)
        for future in self._calls.values():
            if not future.done():
                future.set_exception(EngineDeadError(error))

    def _take(self, message: FromEngine) -> None:
        if isinstance(message, Outputs):
            for output in message.outputs:
                if output.finish_reason is not None:
                    self._unfinished.pop(output.request_id, None)
            self._outputs.put(message.outputs)
        elif isinstance(message, Reply) and (future := self._calls.get(message.id)) is not None and not future.done():
            if message.error is None:
                future.set_result(message.value)
            else:
                future.set_exception(RuntimeError(message.error))


def _check_readable(request: EngineRequest) -> None:
    """Raises `ValueError` for fields of a wrong type, on which an engine would close the whole connection."""
    decode(encode(msgspec.structs.replace(request, prompt_ids=_NO_IDS, output_ids=[], embeds=None)), EngineRequest)
