"""How the front reaches an engine: in this process (`EngineCore`) or in another one (`EngineClient`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import msgspec

from .engine import EngineOutput, EngineRequest, EngineStats
from .executor import WorkerDescription
from .pooling_params import PoolingFacts


class EngineInfo(WorkerDescription, frozen=True, kw_only=True):
    """What an engine tells its front once it is ready: what its workers chose, its sizes, and what it can do.

    `max_model_len` counts the tokens of the longest request, prompt and output; the KV cache has `num_blocks` blocks of
    `block_size` tokens. `stages` are (name, seconds) of the start. `pooling` says what a pooling engine can do; None
    for one that generates.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    stages: list[tuple[str, float]] = msgspec.field(default_factory=list)
    pooling: PoolingFacts | None = None


class BrokenEngineError(RuntimeError):
    """Raised by `EngineCore.step` when no request but the engine or its device is broken: a new process may help."""


class EngineCore(Protocol):
    """An engine in the caller's process, whose thread makes all calls."""

    info: EngineInfo

    def watch(self, journal: Any, suspects: Any) -> None:
        """Called before the first request: the engine writes the requests of each step to `journal` before its launch.

        It runs `suspects`, requests that an earlier engine may have died of, apart from the others.
        """

    def add(self, request: EngineRequest) -> None:
        """Queues a request; raises `ValueError` when it can never run, for example with too few KV blocks for it."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; unknown ids are ignored. Their last output has finish_reason "abort"."""

    def step(self) -> list[EngineOutput]:
        """Runs steps until a request has an output, and returns the outputs; [] when no request is left."""

    def has_unfinished(self) -> bool:
        """Whether requests are waiting or running."""

    def has_idle_work(self) -> bool:
        """Whether `step`, with no request, would prepare the engine for later ones; that takes up to about 100 ms."""

    def stats(self) -> EngineStats:
        """The counters and gauges now."""

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Calls a control method by name: pauses, sleep, profiles, reset_prefix_cache, update_weights, worker (RPC).

        `timeout` bounds what workers of other processes do for `worker`; raises `TimeoutError`.
        """

    def check(self) -> None:
        """Raises `RuntimeError` when the engine cannot serve any more, for example because a worker is dead."""

    def close(self) -> None:
        """Frees the device and stops workers. May be called twice."""


class EngineDeadError(RuntimeError):
    """The engine process is gone; the message is the root cause in one sentence."""


class EngineClient(Protocol):
    """An engine in another process, for an asyncio loop. It outlives the engine process, and reaches the next one."""

    @property
    def info(self) -> EngineInfo:
        """What the engine that serves, or served last, said of itself."""

    async def add(self, request: EngineRequest) -> None:
        """Sends a request; waits while an engine is started again. Raises `EngineDeadError` when none will be."""

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; unknown ids are ignored."""

    def outputs(self) -> AsyncIterator[list[EngineOutput]]:
        """Everything the engine emits, in order. Ends when the client is closed.

        When the engine dies, every unfinished request gets an output with finish_reason "error", in a batch of such
        outputs only; fault "lost" says that another engine is on its way, to which the request may be added again.
        """

    async def stats(self) -> EngineStats:
        """Counters and gauges now."""

    async def call(self, method: str, arguments: dict[str, Any] | None = None) -> Any:
        """As `EngineCore.call`."""

    @property
    def error(self) -> str | None:
        """None while the engine serves, else why it does not."""

    async def close(self) -> None:
        """Ends the connection, and the engine process when this client started it."""
