"""How the front reaches an engine in another process, and what an engine tells of itself."""

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
    `block_size` tokens. `encodes`: the model has an encoder, for which prompts are. `stages` are (name, seconds) of
    the start. `pooling` says what a pooling engine can do; None for one that generates.
    """

    max_model_len: int
    vocab_size: int
    num_blocks: int
    block_size: int
    encodes: bool = False
    stages: list[tuple[str, float]] = msgspec.field(default_factory=list)
    pooling: PoolingFacts | None = None


class BrokenEngineError(RuntimeError):
    """Raised by a step of an engine when no request but the engine or its device is broken: a new process may help."""


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
        """Calls a control method of the engine by name, such as "sleep"."""

    @property
    def error(self) -> str | None:
        """None while the engine serves, else why it does not."""

    async def close(self) -> None:
        """Ends the connection, and the engine process when this client started it."""
