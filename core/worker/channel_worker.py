"""A worker at the other end of a socket: what is said over it, and the proxy in the engine's process.

Steps are sent without waiting; answers are matched in order. Messages are typed msgpack; callables do not travel.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, NoReturn

import msgspec

from frame.links.step_messages import Execute, Sample

from ..interfaces.executor import StepHandle, WorkerFacts, WorkerReady
from ..interfaces.kv import KVLayout
from ..interfaces.step import StepPlan, StepResult
from ..processes.broadcast import RingShape
from ..processes.channel import Channel


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

    def __init__(self, worker: ChannelWorker) -> None:
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


class ChannelWorker(ABC):
    """Implements `frame.interfaces.WorkerProtocol` over a channel; a subclass says how the worker ends."""

    def __init__(self, channel: Channel, progress: Callable[[str], None]) -> None:
        self.channel = channel
        self._progress = progress
        self._steps: deque[RemoteStep] = deque()
        self._values: deque[Value | Failure] = deque()
        self._asked = False  # a call is not answered yet
        self._num_unheard = 0  # answers still to come whose callers have timed out

    def load(self) -> WorkerFacts:
        return msgspec.convert(self._ask(Call("load")), WorkerFacts)

    def allocate(self, layout: KVLayout) -> WorkerReady:
        return msgspec.convert(self._ask(Call("allocate", {"layout": layout})), WorkerReady)

    def execute(self, plan: StepPlan) -> None:
        self.send(Execute.of(plan))

    def sample(self, masks: bytes = b"") -> StepHandle:
        self.send(Sample.of(masks))
        return self.expect_step()

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        refuse_callables(method, arguments)
        return self._ask(Call(method, arguments), timeout)

    def fileno(self) -> int:
        return self.channel.fileno()

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
            self.lost()
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
        self.send(call)
        return self._value(call.method, timeout)

    def _value(self, method: str, timeout: float | None) -> Any:
        latest = None if timeout is None else time.monotonic() + timeout
        while not self._values:
            if latest is not None and not self.channel.readable(latest - time.monotonic()):
                self.forget_value()
                raise TimeoutError(unanswered(method, timeout))
            self.read_one()
        return self.take_value()

    def send(self, message: ToWorker) -> None:
        """Tells the worker something; raises `DeadWorkerError` when it is gone."""
        try:
            self.channel.send(message, self.read_one)
        except OSError:
            self.lost()

    @abstractmethod
    def check(self) -> None:
        """Raises `DeadWorkerError` when the worker is gone."""

    @abstractmethod
    def lost(self) -> NoReturn:
        """Raises `DeadWorkerError`: the worker has closed its end."""


def refuse_callables(method: str, arguments: dict[str, Any] | None) -> None:
    """Raises `ValueError` for an argument that cannot be sent."""
    for name, value in (arguments or {}).items():
        if callable(value):
            raise ValueError(f"{method}: {name} is a callable, which cannot travel to a worker process; name it")


def unanswered(method: str, seconds: float | None) -> str:
    """What is said of a worker that takes too long."""
    return f"a worker did not answer {method} within {seconds:g} seconds; it goes on with it"
