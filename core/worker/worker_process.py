"""A worker in a process of its own: the proxy in the engine's process, and the loop on the other side.

Steps are sent without waiting; answers are matched in order. Messages are typed msgpack; callables do not travel. The
workers of one engine get them by a broadcast (`worker_team`), a single one by its socket; answers come by sockets.
"""

from __future__ import annotations

import contextlib
import gc
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar, cast

import msgspec

from ..interfaces.executor import DeadWorkerError, StepHandle, WorkerFacts, WorkerReady
from ..interfaces.kv import KVLayout
from ..interfaces.step import StepPlan, StepResult
from ..interfaces.wire import Borrowed
from ..plugin_host.isolation import culprit
from ..processes.broadcast import BroadcastReader, BroadcastWriter, RingShape
from ..processes.channel import Channel
from ..processes.python_command import python_command
from ..startup.openmp import child_environment
from .factory import worker_of
from .heartbeat import Heartbeat, HeartbeatMemory

T = TypeVar("T")

#: Seconds that a worker gets to end by itself.
CLOSE_SECONDS = 10.0


class Execute(msgspec.Struct, tag=True):
    """Engine to worker: run a step's forward pass; answered with `Sampled` after `Sample`."""

    plan: StepPlan


class Sample(msgspec.Struct, tag=True):
    """Engine to worker: sample the step executed last."""

    masks: Borrowed = Borrowed(b"")


class Attach(msgspec.Struct, tag=True):
    """Engine to worker, by socket: what follows comes by a broadcast of this shape, whose files come next; answered."""

    shape: RingShape
    reader: int


class Call(msgspec.Struct, tag=True):
    """Engine to worker: a method of `WorkerProtocol` or of the worker by name; answered with `Value`."""

    method: str
    arguments: dict[str, Any] | None = None


class WorkerStage(msgspec.Struct, tag=True):
    """Worker to engine: a stage of the start began."""

    name: str


class Sampled(msgspec.Struct, tag=True):
    """Worker to engine: what a step produced."""

    result: StepResult


class Value(msgspec.Struct, tag=True):
    """Worker to engine: the answer to a call."""

    value: Any


class Failure(msgspec.Struct, tag=True):
    """Worker to engine: what was asked for raised. `kind` names the exception, `culprit` the plugin where it arose."""

    kind: str
    message: str
    step: int | None = None
    culprit: str = ""


ToWorker = Execute | Sample | Call | Attach
FromWorker = WorkerStage | Sampled | Value | Failure


class WorkerError(RuntimeError):
    """A worker raised; `culprit` is the plugin of another package in which it did, "" if in none."""

    def __init__(self, message: str, culprit: str = "") -> None:
        super().__init__(message)
        self.culprit = culprit


class RemoteStep:
    """A step that a remote worker runs."""

    def __init__(self, worker: RemoteWorker) -> None:
        self._worker = worker
        self.answer: StepResult | WorkerError | None = None

    def ready(self) -> bool:
        self._worker.read_arrived()
        return self.answer is not None

    def results(self) -> list[StepResult]:
        while self.answer is None:
            self._worker.read_one()
        if isinstance(self.answer, WorkerError):
            raise self.answer
        return [self.answer]


class RemoteWorker:
    """Implements `frame.interfaces.WorkerProtocol` over a socket. The process ends with this one."""

    def __init__(self, recipe: bytes, progress: Callable[[str], None]) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        self._progress = progress
        self._heartbeat = HeartbeatMemory()
        passed = theirs.fileno(), self._heartbeat.descriptor
        self._steps: deque[RemoteStep] = deque()
        self._values: deque[Value | Failure] = deque()
        self._asked = False  # a call is not answered yet
        self._num_unheard = 0  # answers still to come whose callers have timed out
        with theirs:
            self._process = subprocess.Popen(
                python_command("frame", "worker", str(passed[0]), "--heartbeat", str(passed[1])),
                stdin=subprocess.PIPE,
                pass_fds=passed,
                env=child_environment(),
            )
        if self._process.stdin is None:
            raise RuntimeError("the worker process has no standard input")
        with self._process.stdin as stdin:
            stdin.write(recipe)
        self.channel = Channel(ours, FromWorker)
        self._attached = False

    def load(self) -> WorkerFacts:
        self._progress("worker process")
        return msgspec.convert(self._ask(Call("load")), WorkerFacts)

    def allocate(self, layout: KVLayout) -> WorkerReady:
        return msgspec.convert(self._ask(Call("allocate", {"layout": layout})), WorkerReady)

    def execute(self, plan: StepPlan) -> None:
        self._send(Execute(plan))

    def sample(self, masks: bytes = b"") -> StepHandle:
        self._send(Sample(Borrowed(masks)))
        return self.expect_step()

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        refuse_callables(method, arguments)
        return self._ask(Call(method, arguments), timeout)

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

    def fileno(self) -> int:
        return self.channel.fileno()

    def silent_seconds(self) -> float:
        return self._heartbeat.silent_seconds()

    def progress(self) -> tuple[int, int]:
        return self._heartbeat.progress()

    def read_arrived(self) -> None:
        """Takes what has arrived, without waiting; raises `DeadWorkerError` at the end."""
        while self.channel.readable():
            self.read_one()

    def read_one(self) -> None:
        """Waits for one message and gives it to the step or call that it answers."""
        try:
            message = self.channel.receive()
        except OSError:
            message = None
        if message is None:
            self._lost()
        elif isinstance(message, WorkerStage):
            self._progress(message.name)
        elif isinstance(message, Sampled):
            self._steps.popleft().answer = message.result
        elif isinstance(message, Failure) and message.step is not None:
            self._steps.popleft().answer = WorkerError(f"{message.kind}: {message.message}", message.culprit)
        elif self._num_unheard:  # answers come in the order of the questions
            self._num_unheard -= 1
        else:
            self._values.append(message)

    def attach(self, writer: BroadcastWriter, reader: int) -> None:
        """Has the worker take its messages from a broadcast from now on, and none by its socket."""
        self.expect_value()
        self._send(Attach(writer.shape, reader))
        self.channel.send_descriptors(writer.descriptors(reader))
        self._attached = True
        self._value("attach", None)

    def expect_step(self) -> RemoteStep:
        """The handle of a step that the worker was told to sample."""
        self._steps.append(RemoteStep(self))
        return self._steps[-1]

    def expect_value(self) -> None:
        """Notes that the worker is about to be asked something."""
        self._asked = True

    def has_value(self) -> bool:
        """Whether the worker has answered what it was asked; takes what has arrived."""
        self.read_arrived()
        return bool(self._values)

    def take_value(self) -> Any:
        """The answer that arrived; raises what the worker raised."""
        self._asked = False
        answer = self._values.popleft()
        if isinstance(answer, Failure):
            raise WorkerError(answer.message if answer.kind == "ValueError" else f"{answer.kind}: {answer.message}")
        return answer.value

    def forget_value(self) -> None:
        """Drops the answer to come, for which nobody waits any more."""
        self._num_unheard += 1
        self._asked = False

    def _ask(self, call: Call, timeout: float | None = None) -> Any:
        """The worker's answer; raises `TimeoutError` after `timeout` seconds, and a later answer is then dropped."""
        self.expect_value()
        self._send(call)
        return self._value(call.method, timeout)

    def _value(self, method: str, timeout: float | None) -> Any:
        latest = None if timeout is None else time.monotonic() + timeout
        while not self._values:
            if latest is not None and not self.channel.readable(latest - time.monotonic()):
                self.forget_value()
                raise TimeoutError(unanswered(method, timeout))
            self.read_one()
        return self.take_value()

    def _send(self, message: ToWorker) -> None:
        if self._attached:
            raise RuntimeError("this worker takes its messages from a broadcast to all workers")
        try:
            self.channel.send(message, self.read_one)
        except OSError:
            self._lost()

    def _lost(self) -> None:
        try:
            status: int | str = self._process.wait(CLOSE_SECONDS)
        except subprocess.TimeoutExpired:
            status = "none: it closed its socket"
        raise _death(status)


def refuse_callables(method: str, arguments: dict[str, Any] | None) -> None:
    """Raises `ValueError` for an argument that cannot be sent."""
    for name, value in (arguments or {}).items():
        if callable(value):
            raise ValueError(f"{method}: {name} is a callable, which cannot travel to a worker process; name it")


def unanswered(method: str, seconds: float | None) -> str:
    """What is said of a worker that takes too long."""
    return f"a worker did not answer {method} within {seconds:g} seconds; it goes on with it"


def _death(status: int | str) -> DeadWorkerError:
    return DeadWorkerError(f"the worker process died with exit status {status}", killed=status == -signal.SIGKILL)


def serve_worker(descriptor: int, heartbeat: int) -> int:
    """The worker process: reads its configuration from standard input, then serves the socket until it closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # ctrl-C is the engine's to answer; its end ends this process
    recipe = sys.stdin.buffer.read()
    channel = Channel(socket.socket(fileno=descriptor), ToWorker)
    worker = worker_of(recipe, lambda stage: channel.send(WorkerStage(stage)))
    loop = _WorkerLoop(worker, channel, partial(culprit, worker.registry))
    Heartbeat(heartbeat, lambda: (loop.step, worker.num_collectives))
    try:
        with contextlib.suppress(ConnectionError):  # the engine has closed its end with answers unread
            _serve(loop, channel)
    finally:
        worker.close()
    return 0


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
            source = BroadcastReader(message.shape, message.reader, files, channel, ToWorker)
            channel.send(Value(None))
        else:
            loop.handle(message)
        # Launch what has been sent already before waiting for the device.
        while loop.unanswered and not source.readable():
            loop.answer_oldest()


class _WorkerLoop:
    """Launches steps as they come and answers them in order, when their tokens are on the host."""

    def __init__(
        self, worker: Any, channel: Channel, culprit: Callable[[BaseException], str] = lambda error: ""
    ) -> None:
        self.unanswered: deque[tuple[int, StepHandle | Exception]] = deque()
        self._worker = worker
        self._channel = channel
        self._culprit = culprit
        self.step = 0
        self._failed: Exception | None = None

    def handle(self, message: Execute | Sample | Call) -> None:
        """Does what a message asks for; answers to steps come later, by `answer_oldest`."""
        if isinstance(message, Execute):
            self.step = message.plan.step
            self._failed = self._try(partial(self._worker.execute, message.plan))
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
                traceback.print_exc()
                self._channel.send(Failure(type(error).__name__, str(error)))

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
