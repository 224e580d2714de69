"""An executor: makes the workers of an engine, in this process or others, and brings steps to them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import msgspec

from .kv import AnyKVSpec, KVLayout
from .mesh import Mesh, Nodes, Placement
from .pooling_params import PoolingFacts
from .step import PrefixCosts, StepPlan, StepResult

if TYPE_CHECKING:
    import socket

    from .setup import ExecutorSetup


class DeadWorkerError(RuntimeError):
    """A worker's process is gone. `killed`: by SIGKILL, so that the step it computed need not be the cause."""

    def __init__(self, message: str, *, killed: bool = False) -> None:
        super().__init__(message)
        self.killed = killed


class StepHandle(Protocol):
    """A step that was launched, and may not be finished."""

    def ready(self) -> bool:
        """Whether `results` would return at once."""

    def results(self) -> list[StepResult]:
        """Waits for the step; returns by rank the results of the workers whose facts say `answers`.

        Raises what a worker raised.
        """


class WorkerDescription(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker chose, by the names that users know.

    `attention` names the backend of each KV group and spec, then of each spec of layers without a cache.
    `not_deterministic` says why no request may ask for `deterministic`; "" where each may. Up to `prefix_tile_rows`
    rows that share a prefix may read it together, 0 where none may; `prefix_costs` says what a layer loses and saves by
    that. `embed_size` is the length of a token's embedding, 0 where requests may not bring embeddings.
    """

    platform: str
    dtype: str
    attention: list[str]
    not_deterministic: str = ""
    prefix_tile_rows: int = 0
    prefix_costs: PrefixCosts | None = None
    embed_size: int = 0


class WorkerFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker knows once its model is loaded; the engine plans the KV cache of all workers from it.

    `kv_specs` are the specs of all layers of the model that keep something, by layer name; their blocks hold a multiple
    of `block_multiples` tokens, where a backend asks for that. `kv_bytes` is what a cache may take here, and a block of
    each pool takes `pool_bytes` of it. `digest` hashes everything besides the tokens that decides the bits of this
    worker's blocks, `model` weights and element types alone, which all workers share. `answers`: its steps have
    results.
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
    """What a worker reports once its KV cache is allocated and it takes steps.

    `handshake` is what its KV connector tells the scheduler side, `wants_capture` whether shapes are left to capture.
    `stages` are (name, seconds) of its start. `pooling` says what a pooling model can do; None for one that generates.
    """

    handshake: bytes = b""
    wants_capture: bool = False
    stages: list[tuple[str, float]] = []
    pooling: PoolingFacts | None = None


class Progress(NamedTuple):
    """How far a worker is: the newest step that it began, and in it collectives that it called.

    `exchanges`: of these, those that every engine makes which shares the experts.
    """

    step: int
    collectives: int
    exchanges: int


class WorkerProtocol(Protocol):
    """What an executor may call on a worker, in this process or another."""

    def load(self) -> WorkerFacts:
        """Initialises the device and loads the model. Called once, first."""

    def allocate(self, layout: KVLayout) -> WorkerReady:
        """Allocates the KV cache and warms up; called once, after `load`."""

    def execute(self, plan: StepPlan) -> None:
        """Applies state changes and runs the forward pass."""

    def sample(self, masks: bytes = b"") -> StepHandle:
        """Draws tokens for the step that was executed last; `masks` as in `Executor.sample`."""

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Calls a control method by name: methods of `collective_rpc`, profiling, sleep.

        Raises `TimeoutError` when there is no answer after `timeout` seconds; a later answer is dropped. A worker in
        the calling thread cannot be timed, and raises `ValueError` for a timeout.
        """

    def check(self) -> None:
        """Raises `RuntimeError` when the worker cannot serve any more."""

    def progress(self) -> Progress | None:
        """Where it is: where it lags, other workers wait for it. None where that cannot be known. From any thread."""

    def close(self) -> None:
        """Frees the device. May be called twice."""


class SpawnedWorker(WorkerProtocol, Protocol):
    """A worker in another process of this machine; its handles read what has arrived when asked whether it is ready."""

    def fileno(self) -> int:
        """A descriptor that is readable when something has arrived."""

    def silent_seconds(self) -> float:
        """Seconds since the process ran last; it also runs while it waits for a device or for other workers."""

    def begin_close(self, *, kills: bool = False) -> None:
        """Tells the process to end, or kills it, without waiting for that as `close` does."""


class SpawnedTeam(Protocol):
    """Spawned workers that are told everything at once, steps and calls, so that all do it in the same order."""

    def execute(self, plan: StepPlan) -> None:
        """As `WorkerProtocol.execute`, of all. Raises `DeadWorkerError` naming a worker that takes nothing."""

    def sample(self, masks: bytes = b"") -> list[StepHandle]:
        """As `WorkerProtocol.sample`, of all; by rank."""

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        """As `WorkerProtocol.call`, of all; the answers by rank. Errors name the worker."""

    def close(self) -> None:
        """Frees what they share. The workers are closed each by itself. May be called twice."""


class WorkerFactory(Protocol):
    """Makes the workers of an engine for its executor, which decides in which process each runs."""

    def local(self, placement: Placement) -> WorkerProtocol:
        """A worker in the calling process."""

    def spawn(self, placement: Placement) -> SpawnedWorker:
        """A worker in a process of its own (`python -m frame worker`); it ends with its parent."""

    def join(self, workers: Sequence[SpawnedWorker]) -> SpawnedTeam:
        """Has all workers of an engine, which it spawned and allocated, take messages together from now on."""

    def recipe(self, placement: Placement) -> bytes:
        """JSON from which a `WorkerProcess` on another machine makes the worker."""

    def connected(self, connection: socket.socket, where: str) -> SpawnedWorker:
        """The worker that a `WorkerProcess` at the other end serves; `where` names its machine in errors."""


class Executor(ABC):
    """Owns the workers of one engine. Built as `Class(setup, options)`; it may make workers then or in `load`.

    `load` and `allocate` return one entry for each of the setup's placements, in order of rank.
    """

    #: steps that may be launched before the oldest is answered
    max_in_flight: int = 2
    #: whether the workers of a node are on its machine, and take its devices in the order of their ranks
    takes_local_devices: bool = True
    #: whether the workers are in the caller's process, so that they take callables
    is_local: bool = False

    def __init__(self, setup: ExecutorSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.workers: WorkerFactory = setup.workers

    @classmethod
    def supports(cls, mesh: Mesh) -> str | None:
        """None when it can run the workers of `mesh`, else why not. By default it can run one."""
        return None if mesh.engine_size == 1 else "it runs one worker"

    @classmethod
    def serve_node(cls, nodes: Nodes, options: Any = None) -> int:
        """Runs the workers of a node other than 0 until the engine needs no more of them; returns the exit status.

        Raises `ValueError` where it cannot, as by default.
        """
        raise ValueError(f"{cls.__name__} runs workers on one machine, and node_rank is {nodes.rank}")

    @abstractmethod
    def load(self) -> list[WorkerFacts]:
        """Starts the workers and has each load its model. Raises one error with the root cause."""

    @abstractmethod
    def allocate(self, layout: KVLayout) -> list[WorkerReady]:
        """Has each worker allocate its part of the KV cache, after which it takes steps. Raises as `load` does."""

    @abstractmethod
    def execute(self, plan: StepPlan) -> None:
        """Sends a step to every worker; does not wait for the device."""

    @abstractmethod
    def sample(self, masks: bytes = b"") -> StepHandle:
        """Has the workers draw tokens for the step executed last; `masks` are packed `TokenMasks`, or empty."""

    @abstractmethod
    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        """Calls a method of every worker by name; returns the answers by rank. Other processes take plain data only.

        `timeout` is as in `WorkerProtocol.call`, and given only if a caller of `collective_rpc` asks for it.
        """

    def check(self) -> None:
        """Raises `DeadWorkerError`, or another `RuntimeError`, when a worker is dead."""

    def progress(self) -> Progress | None:
        """Where the worker is that is behind the others, None where that is not known. From any thread."""
        return None

    def close(self) -> None:
        """Stops the workers, and leaves no process behind. May be called twice."""
