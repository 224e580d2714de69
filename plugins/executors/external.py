"""The external executor: under torchrun every process runs the same engine, and holds one of its workers.

Nobody is told what to do: all engines plan the same steps, since they are given the same requests in the same order.
They compare each plan before they run it, and give one another the answers, so that all go on alike.
"""

from __future__ import annotations

import os
import socket
import zlib
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import msgspec

from frame.interfaces import (
    DeadWorkerError,
    Executor,
    ExecutorSetup,
    KVLayout,
    Mesh,
    Placement,
    StepHandle,
    StepPlan,
    StepResult,
    WorkerFacts,
    WorkerProtocol,
    WorkerReady,
    decode,
    encode,
)

from .engine_exchange import EngineExchange, join_store, serve_store

T = TypeVar("T")

#: What torchrun, and launchers like it, tell each process.
VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Told(msgspec.Struct):
    """What one engine tells the others: a value as msgpack, or the error that its worker raised."""

    value: bytes = b""
    error: str = ""


class ExternalExecutor(Executor):
    """Calls this process's worker directly, and waits for the engines of the other processes in each step."""

    is_local = True
    takes_local_devices = False  # but those that the launcher names

    def __init__(self, setup: ExecutorSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self._broken: DeadWorkerError | None = None
        self._answering: list[int] = []
        self._failed: Exception | None = None
        placement, self._store = placement_of(setup.mesh, os.environ)
        self._rank = placement.rank
        self._exchange: EngineExchange | None = None
        self._worker: WorkerProtocol | None = None
        try:
            self._exchange = EngineExchange(placement)
            self._worker = self.workers.local(placement)
        except BaseException:
            self.close()
            raise

    @classmethod
    def supports(cls, mesh: Mesh) -> str | None:
        return why_not(mesh, os.environ)

    def load(self) -> list[WorkerFacts]:
        facts = self._shared(self._local.load, WorkerFacts)
        output = self.setup.mesh.output_rank
        answering = [rank for rank, fact in enumerate(facts) if fact.answers]
        self._answering = sorted(answering, key=lambda rank: (rank != output, rank))
        return facts

    def allocate(self, layout: KVLayout) -> list[WorkerReady]:
        return self._shared(lambda: self._local.allocate(layout), WorkerReady)

    def execute(self, plan: StepPlan) -> None:
        self._compare(plan)
        self._failed = None
        try:
            self._local.execute(plan)
        except Exception as error:  # told to the other engines with the answer
            self._failed = error

    def sample(self, masks: bytes = b"") -> StepHandle:
        try:
            handle: StepHandle | Exception = self._failed or self._local.sample(masks)
        except Exception as error:
            handle = error
        return ExternalStep(self, handle)

    def answers(self, handle: StepHandle | Exception) -> list[StepResult]:
        """Waits for a step on all engines; raises what any of their workers raised."""

        def mine() -> list[StepResult]:
            if isinstance(handle, Exception):
                raise handle
            results = handle.results()
            return results if self._rank in self._answering else []

        by_rank = self._shared(mine, list[StepResult])
        return [result for rank in self._answering for result in by_rank[rank]]

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        return self._shared(lambda: self._local.call(method, arguments, timeout), Any)

    def check(self) -> None:
        if self._broken is not None:
            raise self._broken

    def close(self) -> None:
        if self._worker is not None:
            self._worker.close()
        if self._exchange is not None:
            self._exchange.close()
        self._store = None

    @property
    def _local(self) -> WorkerProtocol:
        if self._worker is None:
            raise RuntimeError("the executor is closed")
        return self._worker

    def _compare(self, plan: StepPlan) -> None:
        """Raises `DeadWorkerError` where another engine planned something else, before it is computed."""
        mine = zlib.crc32(encode(plan)).to_bytes(4, "big")
        all_of_them = self._gather(mine)
        others = [rank for rank, digest in enumerate(all_of_them) if digest != all_of_them[0]]
        if others:
            raise self._break(
                f"step {plan.step}: ranks {', '.join(map(str, others))} planned another step than rank 0; all "
                "processes must give their engines the same configuration and the same requests in the same order"
            )

    def _shared(self, work: Callable[[], T], kind: Any) -> list[T]:
        """What `work` returned on each rank, in order; raises the first error of a rank on all of them."""
        raised: Exception | None = None
        try:
            told = Told(encode(work()))
        except Exception as error:
            raised, told = error, Told(error=f"{type(error).__name__}: {error}")
        heard = [decode(data, Told) for data in self._gather(encode(told))]
        if raised is not None:
            raise raised
        for rank, one in enumerate(heard):
            if one.error:
                raise RuntimeError(f"worker {rank} of {len(heard)}: {one.error}")
        return [decode(one.value, kind) for one in heard]

    def _gather(self, data: bytes) -> list[bytes]:
        self.check()
        if self._exchange is None:
            raise RuntimeError("the executor is closed")
        try:
            return self._exchange.gather(data)
        except TimeoutError as error:
            raise self._break(f"rank {self._rank} waits for the engines of other processes in vain: {error}") from None

    def _break(self, message: str) -> DeadWorkerError:
        self._broken = DeadWorkerError(message)
        return self._broken


class ExternalStep:
    """A step of all engines. It is never ready before its turn, so that every engine waits for it at the same place."""

    def __init__(self, executor: ExternalExecutor, handle: StepHandle | Exception) -> None:
        self._executor, self._handle = executor, handle
        self._answers: list[StepResult] | None = None

    def ready(self) -> bool:
        return self._answers is not None

    def results(self) -> list[StepResult]:
        if self._answers is None:
            self._answers = self._executor.answers(self._handle)
        return self._answers


def why_not(mesh: Mesh, variables: Mapping[str, str]) -> str | None:
    """None when this process is one of as many as `mesh` has workers, else why it is not."""
    missing = [name for name in VARIABLES if name not in variables]
    if missing:
        return f"it is for processes that torchrun starts, which have {', '.join(VARIABLES)}; {missing[0]} is not set"
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"):
        if not variables[name].isdecimal():
            return f"{name} must be a whole number, not {variables[name]!r}"
    if (world := int(variables["WORLD_SIZE"])) != mesh.size:
        return f"{mesh.size} workers need as many processes, and WORLD_SIZE is {world}"
    if (rank := int(variables["RANK"])) >= world:
        return f"RANK {rank} is not below WORLD_SIZE {world}"
    return None


def placement_of(mesh: Mesh, variables: Mapping[str, str]) -> tuple[Placement, Any]:
    """The place of this process's worker, and the store that it serves for the others, or None.

    torchrun serves a store itself; under other launchers the process of rank 0 does. Each engine of a process has keys
    of its own in it.
    """
    host, port, rank = variables["MASTER_ADDR"], int(variables["MASTER_PORT"]), int(variables["RANK"])
    authority = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    served = None
    if variables.get("TORCHELASTIC_USE_AGENT_STORE") != "True" and rank == 0:
        served = serve_store(host, port)
    attempt = f"frame-{variables.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    store = join_store(f"store://{authority}/{attempt}")
    number = store.add(f"engines-of-{rank}", 1)
    placement = Placement(
        rank=rank,
        local_rank=int(variables["LOCAL_RANK"]),
        mesh=mesh,
        rendezvous=f"store://{authority}/{attempt}-{number}",
        address=own_address(host, port),
    )
    return placement, served


def own_address(host: str, port: int) -> str:
    """The address of this machine from which it reaches `host`, at which others reach it too."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, proto) as probe:
        probe.connect(address)  # sends nothing
        found: str = probe.getsockname()[0]
    return found
