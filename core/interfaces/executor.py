"""An executor: where workers run and how steps reach them. Knows no scheduling and no text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Protocol

from .kv import KVLayout
from .step import StepPlan, StepResult


class StepHandle(Protocol):
    """A launched step."""

    def ready(self) -> bool:
        """Whether `result` would return at once."""

    def result(self) -> StepResult:
        """Waits for the step; raises what the worker raised."""


class WorkerProtocol(Protocol):
    """What an executor may call on a worker, in this process or another."""

    def start(self) -> KVLayout:
        """Initialises the device, loads the model, sizes and allocates the KV cache."""

    def execute(self, plan: StepPlan) -> None:
        """Applies state changes and runs the forward pass."""

    def sample(self, masks: bytes = b"") -> StepHandle:
        """Samples the step executed last."""

    def close(self) -> None:
        """Frees the device."""


class Executor(ABC):
    """Owns the workers of one engine. Built as `Class(config=…, options=…, make_worker=…)`.

    `make_worker(rank)` builds a worker in the calling process; an executor that starts processes runs
    `python -m frame worker` there instead and passes the configuration on.
    """

    def __init__(self, *, config: Any, options: Any = None, make_worker: Any) -> None:
        self.config = config
        self.options = options
        self.make_worker = make_worker

    @abstractmethod
    def start(self) -> KVLayout:
        """Starts the workers and returns the KV cache they agreed on. Raises one error with the root cause."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> None:
        """Sends a step to every worker; does not wait for the device."""

    @abstractmethod
    def sample(self, masks: bytes = b"") -> StepHandle:
        """Asks for the tokens of the step executed last; `masks` are grammar bitmasks."""

    @abstractmethod
    def call(self, method: str, arguments: dict[str, Any] | None = None) -> list[Any]:
        """Calls a method of every worker by name; returns the answers by rank. Plain data only across processes."""

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched before the oldest is answered."""
        return 2

    def check(self) -> None:
        """Raises `RuntimeError` when a worker is dead."""

    def close(self) -> None:
        """Stops the workers; leaves no process behind. May be called twice."""
