"""How the front reaches an engine: in this process (`EngineCore`) or in another one (`EngineClient`)."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable
from typing import Any, Protocol

import msgspec

from .engine import EngineOutput, EngineRequest, EngineStats
from .pooling_params import PoolingFacts
from .step import PrefixCosts


class EngineInfo(msgspec.Struct, kw_only=True):
    """What an engine tells its front once it is ready. `stages` are (name, seconds) of the start-up.

    `pooling` says what a pooling engine can do; None for one that generates. `not_deterministic` says why no request
    may ask for `deterministic`; empty where each may.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    platform: str
    attention: list[str]
    dtype: str
    stages: list[tuple[str, float]] = []
    pooling: PoolingFacts | None = None
    not_deterministic: str = ""
    prefix_tile_rows: int = 0  # rows that read a shared prefix together; 0: none do
    prefix_costs: PrefixCosts | None = None


class BrokenEngineError(RuntimeError):
    """Raised by `EngineCore.step` when no request but the engine or its device is broken: a new process may help."""


class EngineCore(Protocol):
    """An engine in the caller's process."""

    info: EngineInfo

    def watch(self, journal: Any, suspects: Any) -> None:
        """Before the first request: keeps a journal of launched steps, and tries the suspects of an earlier engine."""

    def add(self, request: EngineRequest) -> None:
        """Queues a request; raises `ValueError` when it can never run (for example, too few KV blocks for it)."""

    def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; unknown ids are ignored. Their last output has finish_reason "abort"."""

    def step(self) -> list[EngineOutput]:
        """Launches and answers steps until there is something to say; [] when nothing is left to do."""

    def has_unfinished(self) -> bool:
        """Whether requests are waiting or running."""

    def has_idle_work(self) -> bool:
        """Whether `step`, with nothing unfinished, would ready the engine for later requests, for up to some 100 ms."""

    def stats(self) -> EngineStats:
        """Counters and gauges now."""

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> Any:
        """Control methods by name: pauses, sleep, profiles, reset_prefix_cache, update_weights, worker (RPC).

        `timeout` bounds what workers of other processes do for `worker`; raises `TimeoutError`.
        """

    def check(self) -> None:
        """Raises `RuntimeError` when the engine can serve no more, for example because a worker is dead."""

    def close(self) -> None:
        """Frees the device and stops workers. May be called twice."""


class EngineDeadError(RuntimeError):
    """The engine process is gone; carries the root cause in one sentence."""


class EngineClient(Protocol):
    """An engine in another process, from an asyncio loop. Lives through engine restarts."""

    @property
    def info(self) -> EngineInfo:
        """Facts of the engine that serves, or served last."""

    async def add(self, request: EngineRequest) -> None:
        """Sends a request; waits while the engine is started again. Raises `EngineDeadError` when none will come."""

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
