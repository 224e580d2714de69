"""The loop of an engine process: one engine, and the clients that talk to it.

The main thread owns the engine: it handles the messages that arrived, runs a step, and passes outputs to the clients'
writer threads, so that socket work overlaps with the device.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import weakref
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any

from frame.links.door import Door
from frame.quoting import quoted

from ..engine.recovery.suspects import Suspects
from ..engine.request import QueueFullError
from ..interfaces.client import BrokenEngineError
from ..interfaces.engine import EngineOutput, Fault
from ..interfaces.wire import encode
from .channel import Channel, FrameTooLargeError, same_user
from .child_process import describe
from .journal import PULSE_SECONDS, NullJournal, journal_name
from .messages import LAST_WORDS_SECONDS, Abort, Add, Begin, Call, Hello, Outputs, Reply, Rest, ToEngine, Wave, Weights
from .stats_history import StatsHistory

if TYPE_CHECKING:
    from ..engine.engine import Engine

logger = logging.getLogger("frame.server")

_MAX_FAILED_STEPS = 3


class _Client:
    """One connection: a thread that reads into the engine's inbox and a thread that writes."""

    def __init__(self, connection: socket.socket, inbox: SimpleQueue[tuple[_Client | None, Any]]) -> None:
        #: the client's id, once `Hello` has arrived
        self.name: str | None = None
        self._channel = Channel(connection, ToEngine)
        self._inbox = inbox
        self._outbox: SimpleQueue[Any] = SimpleQueue()
        self._writer = threading.Thread(target=self._write, name="client_write", daemon=True)
        self._writer.start()
        threading.Thread(target=self._read, name="client_read", daemon=True).start()

    def send(self, message: Any) -> None:
        """Queues a message; None closes the connection after all earlier messages were sent."""
        self._outbox.put(message)

    def join(self, seconds: float) -> None:
        """Waits until all messages were sent, at most the given seconds, since the client may not read."""
        self._writer.join(max(0.0, seconds))

    def _read(self) -> None:
        try:
            while (message := self._channel.receive()) is not None:
                self._inbox.put((self, message))
        except (OSError, ValueError) as error:
            logger.warning("a client of the engine is cut off: %s", describe(error))
        self._inbox.put((self, None))

    def _write(self) -> None:
        while (message := self._outbox.get()) is not None:
            try:
                self._send(message)
            except OSError:
                break  # the reader notices the broken connection too
        self._channel.close()

    def _send(self, message: Any) -> None:
        try:
            self._channel.send(message)
        except FrameTooLargeError as error:
            if isinstance(message, Outputs) and len(message.outputs) > 1:
                for output in message.outputs:
                    self._send(Outputs([output]))
            elif isinstance(message, Outputs):
                request_id = message.outputs[0].request_id
                self._channel.send(Outputs([_failure(request_id, str(error))]))
                self._inbox.put((self, Abort([request_id])))
            else:
                self._channel.send(Reply(message.id, error=str(error)))


def _failure(request_id: str, error: str, fault: Fault = "engine") -> EngineOutput:
    return EngineOutput(request_id=request_id, finish_reason="error", error=error, fault=fault)


class EngineHost:
    """Serves one engine to clients that connect to `listener`, until `stop`.

    `report` sends the supervisor what it needs to start the same engine again, and that no step is under way where it
    asked. `inbox` may hold a `Wave` of the supervisor already, as (None, wave).
    """

    def __init__(
        self,
        engine: Engine,
        listener: socket.socket | Door,
        journal: NullJournal,
        begin: Begin,
        report: Callable[[Weights | Rest], None] = lambda _: None,
        inbox: SimpleQueue[tuple[_Client | None, Any]] | None = None,
    ) -> None:
        engine.watch(journal, Suspects(begin.suspects))
        self._engine = engine
        self._listener = listener
        self._journal = journal
        self._guilty = begin.guilty
        self._report = report
        self._inbox: SimpleQueue[tuple[_Client | None, Any]] = inbox or SimpleQueue()
        self._clients: set[_Client] = set()
        self._accepted: weakref.WeakSet[_Client] = weakref.WeakSet()  # the accepting thread's
        self._owners: dict[str, _Client] = {}  # request id -> the client that gets its outputs
        self._failed_steps = 0
        self._running, self._resting = True, False
        self._history = StatsHistory(engine.stats)

    def run(self) -> None:
        """Serves until `stop`; raises what the engine raised when its steps fail again and again."""
        accepting = threading.Thread(target=self._accept, name="accept", daemon=True)
        accepting.start()
        try:
            while self._running:
                busy = self._engine.has_unfinished()
                if self._resting and not busy:
                    self._resting = False
                    self._report(Rest())
                waits = not (busy or self._engine.has_idle_work())
                self._drain(None if waits else self._engine.patience)
                if self._running:
                    self._journal.beat(idle=False)
                    self._route(self._step())
                    self._history.note(idle=not self._engine.has_unfinished())
        finally:
            self._journal.beat(idle=True)  # a slow call must not look like a hang
            self._listener.shutdown(socket.SHUT_RDWR)  # the supervisor must know before clients lose their connections
            latest = time.monotonic() + LAST_WORDS_SECONDS
            accepting.join(LAST_WORDS_SECONDS)
            for client in list(self._accepted):
                client.send(None)
            self._listener.close()
            for client in list(self._accepted):
                client.join(latest - time.monotonic())  # all messages are sent, so the process may end

    def stop(self) -> None:
        """Ends `run` after the current step; safe from any thread and from signal handlers."""
        self._inbox.put((None, None))

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return  # closed
            if connection.family != socket.AF_UNIX or same_user(connection):
                self._accepted.add(_Client(connection, self._inbox))
            else:
                connection.close()

    def _drain(self, seconds: float | None) -> None:
        """Handles everything that has arrived; waits so long for the first of it, with None until it comes."""
        self._journal.beat(idle=False)
        while True:
            try:
                item = self._inbox.get(seconds != 0, timeout=PULSE_SECONDS if seconds is None else seconds)
            except Empty:
                if seconds is not None:
                    return
                self._journal.beat(idle=False)  # so that the wait does not look like a hang
            else:
                seconds = 0
                self._handle(*item)

    def _handle(self, client: _Client | None, message: Any) -> None:
        if client is None:
            if isinstance(message, Wave):
                self._engine.begin_wave(message.number)
            elif isinstance(message, Rest):
                self._engine.call("pause")
                self._resting = True
            else:
                self._running = False
            return
        match message:
            case Hello(name=name):
                for older in [one for one in self._clients if one.name == name]:
                    self._leave(older)  # the old connection has not been seen to end yet
                client.name = name
                self._clients.add(client)
            case Add(request=request):
                self._clients.add(client)
                self._add(client, request)
            case Abort(request_ids=request_ids):
                self._engine.abort(request_ids)
            case Call():
                self._call(client, message)
            case None:
                self._leave(client)

    def _leave(self, client: _Client) -> None:
        """Ends a connection, and the requests that came over it."""
        client.send(None)
        self._clients.discard(client)
        orphans = [request_id for request_id, owner in self._owners.items() if owner is client]
        for request_id in orphans:
            del self._owners[request_id]
        self._engine.abort(orphans)

    def _add(self, client: _Client, request: Any) -> None:
        request_id = request.request_id
        if request_id in self._owners:
            refused = _failure(request_id, f"a request with the id {quoted(request_id)} is running already", "request")
        elif self._guilty and (reason := self._guilty.get(journal_name(request_id))) is not None:
            refused = _failure(request_id, reason)
        else:
            try:
                self._engine.add(request)
            except ValueError as error:
                refused = _failure(request_id, describe(error), "request")
            except QueueFullError as error:
                refused = _failure(request_id, describe(error), "load")
            except Exception as error:
                logger.exception("request %s could not be added", request_id)
                refused = _failure(request_id, describe(error))
            else:
                self._owners[request_id] = client
                return
        client.send(Outputs([refused]))

    def _call(self, client: _Client, call: Call) -> None:
        self._journal.beat(idle=True)  # a control method may take longer than any step
        try:
            if call.method == "stats":
                value: Any = self._engine.stats()
            elif call.method == "history":
                value = self._history.samples()
            else:
                value = self._engine.call(call.method, call.arguments)
            reply = Reply(call.id, encode(value))
            if call.method == "update_weights":
                self._report(Weights(call.arguments or {}))
        except Exception as error:
            logger.warning("call of %s failed: %s", call.method, describe(error))
            client.send(Reply(call.id, error=describe(error)))
            if isinstance(error, BrokenEngineError):
                raise
        else:
            client.send(reply)

    def _step(self) -> list[EngineOutput]:
        try:
            outputs = self._engine.step()
        except BrokenEngineError:
            raise
        except Exception as error:
            self._engine.check()
            self._failed_steps += 1
            if self._failed_steps >= _MAX_FAILED_STEPS:
                raise
            logger.exception("a step failed; its requests end with an error")
            failed = list(self._owners)
            self._engine.abort(failed)
            return [_failure(request_id, f"a step of the engine failed: {describe(error)}") for request_id in failed]
        if outputs:
            self._failed_steps = 0
        return outputs

    def _route(self, outputs: list[EngineOutput]) -> None:
        batches: dict[_Client, list[EngineOutput]] = {}
        for output in outputs:
            client = self._owners.get(output.request_id)
            if client is None:
                continue  # its client has disconnected, or it failed before
            batches.setdefault(client, []).append(output)
            if output.finish_reason is not None:
                del self._owners[output.request_id]
        for client, batch in batches.items():
            client.send(Outputs(batch))
