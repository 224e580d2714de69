"""An executor: where workers run and how steps reach them. Knows no scheduling and no text."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

import msgspec

from .kv import AnyKVSpec, KVLayout
from .mesh import Mesh, Placement
from .pooling_params import PoolingFacts
from .step import PrefixCosts, StepPlan, StepResult

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
        """Whether `results` would return at once."""

    def results(self) -> list[StepResult]:
        """Waits for the step; what each worker answers whose facts say `answers`, by rank. Raises what one raised."""


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker chose, by the names that users know.

    `attention` names the backend of each KV group and spec, then of each spec of layers without a cache.
    `not_deterministic` says why no request may ask for `deterministic`; "" where each may. Up to `prefix_tile_rows`
    rows that share a prefix may read it together, 0 where none may; `prefix_costs` says what a layer loses and saves by
    that.
    """

    platform: str
    dtype: str
    attention: list[str]
    not_deterministic: str = ""
    prefix_tile_rows: int = 0
    prefix_costs: PrefixCosts | None = None


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker knows once its model is loaded, from which the engine plans the KV cache of all workers.

    `kv_specs` are those of all layers of the model that keep something, by name; their blocks hold a multiple of
    `block_multiples` tokens, where a backend asks for that. `kv_bytes` is what a cache may take here, in which a block
    of each pool takes `pool_bytes`. `digest` names all that decides the bits of this worker's blocks besides the
    tokens, `model` weights and element types alone, which all workers share. `answers`: its steps have results.
    """

    kv_specs: dict[str, AnyKVSpec]
    kv_bytes: int
    pool_bytes: tuple[int, ...]
    digest: str
    model: str
    described: WorkerDescription
    block_multiples: dict[str, int] = {}
    answers: bool = True


class WorkerReady(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker says once its KV cache is there and it takes steps.

    `handshake` is what its KV connector tells the engine's side, `records` whether shapes are left to be recorded,
    `stages` are (name, seconds) of its start. `pooling` says what a pooling model can do.
    """

    handshake: bytes = b""
    records: bool = False
    stages: list[tuple[str, float]] = []
    pooling: PoolingFacts | None = None


class WorkerProtocol(Protocol):
    """What an executor may call on a worker, in this process or another."""

    def load(self) -> WorkerFacts:
        """Initialises the device and loads the model."""

    def allocate(self, layout: KVLayout) -> WorkerReady:
        """Allocates the KV cache and warms up; called once, after `load`."""

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

    def local(self, placement: Placement) -> WorkerProtocol:
        """A worker in the calling process."""

    def spawn(self, placement: Placement) -> WorkerProtocol:
        """A worker in a process of its own (`python -m frame worker`); it ends with its parent."""

    def recipe(self, placement: Placement) -> bytes:
        """All that a process elsewhere needs to make the worker with `worker_of`, as JSON."""


class Executor(ABC):
    """Owns the workers of one engine. Built as `Class(setup, options)`; makes no worker before `load`, or at once.

    What `load` and `allocate` give is by rank, an entry for each of the setup's placements.
    """

    #: steps that may be launched before the oldest is answered
    max_in_flight: int = 2

    def __init__(self, setup: ExecutorSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.workers: WorkerFactory = setup.workers

    @classmethod
    def supports(cls, mesh: Mesh) -> str | None:
        """None, or why it cannot run the workers of `mesh`; one is what the default can."""
        return None if mesh.size == 1 else "it runs one worker"

    @abstractmethod
    def load(self) -> list[WorkerFacts]:
        """Starts the workers and has each load its model. Raises one error with the root cause."""

    @abstractmethod
    def allocate(self, layout: KVLayout) -> list[WorkerReady]:
        """Has each worker allocate its part of the KV cache; then they take steps. Raises as `load` does."""

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

    def check(self) -> None:
        """Raises `DeadWorkerError`, or another `RuntimeError`, when a worker is dead."""

    def close(self) -> None:
        """Stops the workers; leaves no process behind. May be called twice."""
