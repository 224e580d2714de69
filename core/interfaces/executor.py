"""An executor: where workers run and how steps reach them. Knows no scheduling and no text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

from .kv import KVLayout
from .step import StepPlan, StepResult

if TYPE_CHECKING:
    from .setup import ExecutorSetup


class DeadWorkerError(RuntimeError):
    """A worker is gone. `killed`: by SIGKILL, which need not be the doing of what it computed."""

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


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

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Calls a control method by name: the RPC of `collective_rpc`, profiling, sleep.

        Raises `TimeoutError` when there is no answer after `timeout` seconds, which then goes unheard; `ValueError`
        for a timeout where the worker runs in the calling thread.
        """

    def check(self) -> None:
        """Raises `RuntimeError` when the worker cannot serve any more."""

    def close(self) -> None:
        """Frees the device. May be called twice."""


class WorkerFactory(Protocol):
    """Makes workers for an executor, which decides where they live."""

    def local(self, rank: int) -> WorkerProtocol:
        """A worker in the calling process."""

    def spawn(self, rank: int) -> WorkerProtocol:
        """A worker in a process of its own (`python -m frame worker`); it ends with its parent."""


class Executor(ABC):
    """Owns the workers of one engine. Built as `Class(setup, options)`."""

    def __init__(self, setup: ExecutorSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.workers: WorkerFactory = setup.workers

    @classmethod
    def supports(cls, num_workers: int) -> str | None:
        """None, or why it cannot run so many workers; one is what the default can."""
        return None if num_workers == 1 else "it runs one worker"

    @abstractmethod
    def start(self) -> KVLayout:
        """Starts the workers and returns the KV cache they agreed on. Raises one error with the root cause."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> None:
        """Sends a step to every worker; does not wait for the device."""

    @abstractmethod
    def sample(self, masks: bytes = b"") -> StepHandle:
        """Asks for the tokens of the step executed last; `masks` are packed `TokenMasks`, or empty."""

    @abstractmethod
    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        """Calls a method of every worker by name; returns the answers by rank. Plain data only across processes.

        `timeout` as in `WorkerProtocol.call`; only given where a caller of `collective_rpc` asked for it.
        """

    @property
    def max_in_flight(self) -> int:
        """Steps that may be launched before the oldest is answered."""
        return 2

    def check(self) -> None:
        """Raises `DeadWorkerError`, or another `RuntimeError`, when a worker is dead."""

    def close(self) -> None:
        """Stops the workers; leaves no process behind. May be called twice."""
