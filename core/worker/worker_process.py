"""A worker in a process of its own: its proxy in the engine's process, and the loop on the other side.

The workers of one engine get their messages by a broadcast (`worker_team`), a single one by its socket; answers come by
sockets.
"""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import os
import select
import signal
import socket
import subprocess
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn, TypeVar, cast

import msgspec

from frame.links.early_workers import LinkedChild
from frame.links.lookout import Lookout
from frame.links.step_messages import Execute, Sample

from ..interfaces.executor import DeadWorkerError, Progress, StepHandle, WorkerFacts
from ..interfaces.kv import KVLayout
from ..plugin_host.isolation import culprit
from ..processes.broadcast import BroadcastReader, BroadcastWriter
from ..processes.channel import Channel
from .channel_worker import (
    Attach,
    Call,
    ChannelWorker,
    Failure,
    FromWorker,
    Sampled,
    ToWorker,
    Value,
    WorkerStage,
)
from .factory import Libraries, worker_of
from .heartbeat import Heartbeat

logger = logging.getLogger("frame.worker")

T = TypeVar("T")

#: Seconds that a worker gets to end by itself.
CLOSE_SECONDS = 10.0


class RemoteWorker(ChannelWorker):
    """A worker in a child process, which ends with this one."""

    def __init__(self, recipe: bytes, progress: Callable[[str], None], linked: LinkedChild) -> None:
        super().__init__(Channel(linked.connection, FromWorker), progress)
        self._heartbeat, self._process = linked.heartbeat, linked.child.process
        linked.child.tell(recipe)
        self._attached = False

    def load(self) -> WorkerFacts:
        self._progress("worker process")
        return super().load()

    def check(self) -> None:
        if self._process.poll() is not None:
            raise _death(self._process.returncode)

    def begin_close(self, *, kills: bool = False) -> None:
        self.channel.close()
        if kills or self._asked:  # it may wait for other workers, or load for minutes, and then find the channel closed
            self._process.kill()

    def close(self) -> None:
        self.begin_close()
        try:
            self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._heartbeat.close()

    def silent_seconds(self) -> float:
        return self._heartbeat.silent_seconds()

    def progress(self) -> Progress:
        return self._heartbeat.progress()

    def attach(self, writer: BroadcastWriter, reader: int) -> None:
        """Has the worker take its messages from a broadcast from now on, and none by its socket."""
        self.expect_value()
        self.send(Attach(writer.shape, reader))
        self.channel.send_descriptors(writer.descriptors(reader))
        self._attached = True
        self._value("attach", None)

    def send(self, message: ToWorker) -> None:
        if self._attached:
            raise RuntimeError("this worker takes its messages from a broadcast to all workers")
        super().send(message)

    def lost(self) -> NoReturn:
        try:
            status: int | str = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            status = "none: it closed its socket"
        raise _death(status)


def _is_done(outcome: StepHandle | Exception) -> bool:
    if isinstance(outcome, Exception):
        return True
    try:
        return outcome.ready()
    except Exception:  # which `results` raises too, to be sent
        return True


def _death(status: int | str) -> DeadWorkerError:
    return DeadWorkerError(f"the worker process died with exit status {status}", killed=status == -signal.SIGKILL)


def serve_worker(descriptor: int, heartbeat: int) -> int:
    """The worker process: reads what it is from standard input, then serves the socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the engine's to answer; its end ends this process
    source = io.FileIO(0, closefd=False)  # no buffer: what follows the first line stays in the pipe
    outline = source.readline()
    loaded = threading.Event()
    threading.Thread(target=_end_when_unwanted, args=(loaded,), name="frame-unwanted", daemon=True).start()
    start = time.perf_counter()
    begun = Libraries.of(outline) if outline.strip() else None
    loaded.set()
    ended = time.perf_counter()
    recipe = source.readall()
    if not recipe:
        return 0  # the engine needs no such worker, or is gone
    logger.debug("libraries in %.2f s, the recipe came %.2f s later", ended - start, time.perf_counter() - ended)
    channel = Channel(socket.socket(fileno=descriptor), ToWorker)
    worker = worker_of(recipe, lambda stage: channel.send(WorkerStage(stage)), begun)
    poll_seconds = worker.config.executor.worker_poll_seconds
    loop = _WorkerLoop(worker, channel, partial(culprit, worker.registry), poll_seconds)
    Heartbeat(heartbeat, worker.progress)
    try:
        with contextlib.suppress(ConnectionError):  # the engine has closed its end with answers unread
            _serve(loop, channel)
    finally:
        worker.close()
    return 0


def _end_when_unwanted(loaded: threading.Event) -> None:
    """Ends this process where standard input ends before a recipe comes, and libraries would load for seconds more."""
    source = select.poll()
    source.register(0, select.POLLIN)
    came = any(event & select.POLLIN for _, event in source.poll())
    if not came and not loaded.is_set():  # else it may have been read
        os._exit(0)


def _serve(loop: _WorkerLoop, channel: Channel) -> None:
    """Takes messages from the socket, and from a broadcast once it is attached to one, until the engine is gone."""
    source: Channel | BroadcastReader = channel
    while True:
        if isinstance(source, BroadcastReader):
            if not source.read(loop.handle):
                return
        elif (message := channel.receive()) is None:
            return
        elif isinstance(message, Attach):
            files = channel.receive_descriptors(2)
            shape, reader = message.shape, message.reader
            source = BroadcastReader(shape, reader, files, channel, ToWorker, loop.poll_seconds)
            channel.send(Value(None))
        else:
            loop.handle(message)
        loop.answer_until(source.readable)


class _WorkerLoop:
    """Launches steps as they come and answers them in order, when their tokens are on the host."""

    def __init__(
        self,
        worker: Any,
        channel: Channel,
        culprit: Callable[[BaseException], str] = lambda error: "",
        poll_seconds: float = 0.02,
    ) -> None:
        self.poll_seconds = poll_seconds
        self.unanswered: deque[tuple[int, StepHandle | Exception]] = deque()
        self._worker = worker
        self._channel = channel
        self._culprit = culprit
        self.step = 0
        self._failed: Exception | None = None
        self._lookout = Lookout(poll_seconds)

    def handle(self, message: Execute | Sample | Call) -> None:
        """Does what a message asks for; answers to steps come later, by `answer_oldest`."""
        if isinstance(message, Execute):
            plan = message.plan()
            self.step = plan.step
            self._failed = self._try(partial(self._worker.execute, plan))
        elif isinstance(message, Sample):
            masks = cast("bytes", message.masks.data)  # of a broadcast a read-only view, which serves as well
            outcome: Any = self._failed or self._try(partial(self._worker.sample, masks))
            self.unanswered.append((self.step, outcome))
        else:
            while self.unanswered:
                self.answer_oldest()
            try:
                self._channel.send(Value(self._answer(message)))
            except Exception as error:
                kind = ValueError if isinstance(error, ValueError) else type(error)
                if not (kind is ValueError and message.method in ("load", "allocate")):  # it says all in one sentence
                    traceback.print_exc()
                self._channel.send(Failure(kind.__name__, str(error)))

    def answer_until(self, message_waits: Callable[[], bool]) -> None:
        """Answers launched steps as the device ends them, until a message waits, whose step is launched before that.

        So the device has its next step when it ends one, however late the engine plans it.
        """
        while self.unanswered and not message_waits():
            if _is_done(self.unanswered[0][1]):
                self.answer_oldest()
            else:
                self._lookout.pause()

    def answer_oldest(self) -> None:
        """Waits for the oldest launched step and sends what it produced, or why it failed."""
        step, outcome = self.unanswered.popleft()
        try:
            if isinstance(outcome, Exception):
                raise outcome
            (result,) = outcome.results()
            self._channel.send(Sampled(result))
        except Exception as error:  # also a result that is too large to be sent
            self._channel.send(Failure(type(error).__name__, str(error), step, self._culprit(error)))

    def _try(self, work: Callable[[], T]) -> T | Exception:
        """The result of `work`, or the exception that it raised, which is sent when the engine asks for the tokens."""
        try:
            return work()
        except Exception as error:
            traceback.print_exc()
            return error

    def _answer(self, call: Call) -> Any:
        if call.method == "load":
            return self._worker.load()
        if call.method == "allocate":
            ready = self._worker.allocate(msgspec.convert((call.arguments or {})["layout"], KVLayout))
            gc.freeze()  # as in the engine's process: what lives now lives on
            return ready
        return self._worker.call(call.method, call.arguments)
