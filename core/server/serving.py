"""The services that endpoints get from the HTTP host: `frame.interfaces.Serving`, over text side and engine client."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from frame.elastic.sizes import is_elastic, refusal
from frame.quoting import quoted
from frame.served.adapters import ADAPTER, HostAdapters

from ..config.tree import FrameConfig
from ..front.output_parsers import OutputParsers
from ..interfaces.client import EngineClient, EngineDeadError, EngineInfo
from ..interfaces.engine import EngineStats
from ..interfaces.errors import RequestError
from ..interfaces.pooling_params import PoolingFacts
from ..interfaces.schema import BoundedModel, Limits
from ..interfaces.serving import AdapterCard, RequestCounts
from .bodies import JSON_BODY
from .calls import RouteCalls
from .errors import IgnoredFields, field_error, refusals
from .event_stream import EventStream, race
from .generation import TimedGeneration
from .ingress import OWNER, REQUEST
from .metrics import ServerMetrics
from .reports import Reporter
from .texts import FrontTexts

if TYPE_CHECKING:
    from ..front.async_front import AsyncFront

T = TypeVar("T")
M = TypeVar("M", bound=BoundedModel)

#: Most seconds that a question for the engine's statistics waits for an answer.
_STATS_SECONDS = 2.0


async def _no_parent() -> None:
    raise RequestError(409, "this process has no parent that it could ask to stop")


def model_names(config: FrameConfig) -> list[str]:
    """The model names that requests may use: the configured ones, else the model as given, or "demo"."""
    if config.model.served_model_name:
        return list(config.model.served_model_name)
    name = config.model.model
    if not name:
        return ["demo"]
    return [name if not Path(name).is_absolute() else Path(name).name or name, name][: 2 if name[0] == "/" else 1]


class HostedEngine(EngineClient, Protocol):
    """The client of an engine that may still start, restart, or be gone for good."""

    @property
    def end(self) -> str | None:
        """Why no engine will be started any more; None while one serves or is starting."""


class ServingHost:
    """One for each API process. `llm` is given when the engine is ready for the first time."""

    def __init__(self, config: FrameConfig, client: HostedEngine, metrics_file: int | None = None) -> None:
        self.config = config
        self.client = client
        self.draining = False
        #: the engine's present stage of start-up
        self.stage: str | None = None
        #: the routes, once the application is built
        self.calls: RouteCalls | None = None
        #: asks the parent to stop the server
        self.shut_down: Callable[[], Awaitable[None]] = _no_parent
        self._llm: AsyncFront | None = None
        self._limits: Limits | None = None
        self._parsers: OutputParsers | None = None
        self.models = HostModels(self)
        self.adapters = HostAdapters(self)
        self.metrics = ServerMetrics(metrics_file)
        self.reporter = Reporter(self.models.names[0])
        self.text = FrontTexts(self)
        self.generation = TimedGeneration(self)
        self.http = ServedRequests(self)
        self.engine = ClientControl(self)

    def open(self, llm: AsyncFront, parsers: OutputParsers) -> None:
        """Starts to serve."""
        self._parsers = parsers
        info, server = self.client.info, self.config.server
        self._llm = llm
        self._limits = Limits(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_logprobs=self.config.model.max_logprobs,
            max_n=server.max_n,
            max_prompts=server.max_prompts,
            max_inputs=server.max_inputs,
            max_outputs=server.max_outputs,
            ignored=IgnoredFields(),
            max_messages=server.max_messages,
            max_stop=server.max_stop,
            max_stop_length=server.max_stop_length,
            strict_fields=server.strict_fields,
            trust_request_chat_template=server.trust_request_chat_template,
        )

    @property
    def llm(self) -> AsyncFront:
        """The text side; raises `RequestError` 503 before the engine was ready."""
        return self._opened(self._llm)

    @property
    def parsers(self) -> OutputParsers:
        """The parsers of outputs; raises like `llm`."""
        return self._opened(self._parsers)

    @property
    def limits(self) -> Limits:
        """Bounds of request fields; raises like `llm`."""
        return self._opened(self._limits)

    def _opened(self, part: T | None) -> T:
        if part is None:
            raise RequestError(503, self.error or "the engine is starting")
        return part

    @property
    def error(self) -> str | None:
        """None while requests are served, else why not."""
        if self.draining:
            return "the server is stopping"
        if self.client.error is not None:
            stage = f" (stage: {self.stage})" if self.stage is not None else ""
            return f"{self.client.error}{stage}"
        return "the tokenizer is loading" if self._llm is None else None

    @property
    def problem(self) -> str | None:
        """None while requests are admitted, else why not; those that arrive during a restart wait for it."""
        if self.draining:
            return "the server is stopping"
        if self._llm is None:
            return self.error
        most = self.config.scheduler.max_queue
        if self.client.error is not None and self._llm.front.num_unfinished >= most:
            return f"{self.client.error}, and {most} requests wait for it already (--max-queue)"
        return self.client.end

    @property
    def batches(self) -> RouteCalls:
        """The routes, once the application is built."""
        if self.calls is None:
            raise RequestError(503, "the routes are not there yet")
        return self.calls


class HostModels:
    """Implements `frame.interfaces.ServedModels` for a host."""

    def __init__(self, host: ServingHost) -> None:
        config = host.config
        self._host = host
        self.names = model_names(config)
        self.created = int(time.time())
        seed = f"{version('frame-llm')} {config.model.model_dump_json(exclude={'logits_processors'})}"
        self.fingerprint = f"fp_{hashlib.sha256(seed.encode()).hexdigest()[:12]}"

    @property
    def limits(self) -> Limits:
        return self._host.limits

    @property
    def pooling(self) -> PoolingFacts | None:
        return self._host.llm.front.info.pooling

    async def adapters(self) -> list[AdapterCard]:
        return await self._host.adapters.cards()

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        await self._host.adapters.load(name, path, replace=replace)

    async def unload_adapter(self, name: str) -> None:
        await self._host.adapters.unload(name)

    def served(self, name: str | None) -> str:
        if name is None:
            return self.names[0]
        scope = REQUEST.get()
        if scope is not None and isinstance(failed := scope.get(ADAPTER), RequestError):
            raise failed
        if name not in self.names:
            if (source := self._host.adapters.source(name)) is not None:
                if scope is not None:
                    scope[ADAPTER] = source
                return name
            text = f"no model {quoted(name)}; there are: {', '.join([*self.names, *self._host.adapters.known])}"
            raise RequestError(404, text, param="model", code="model_not_found")
        return name

    def require(self, task: str) -> None:
        with refusals():
            self._host.llm.front.require(task)


class ServedRequests:
    """Implements `frame.interfaces.HttpRequests` for a host."""

    def __init__(self, host: ServingHost) -> None:
        self._host = host

    def parse(self, request: Request, kind: type[M]) -> M:
        body = request.scope.get(JSON_BODY)
        if not isinstance(body, dict):
            raise RequestError(400, "the body must be a JSON object")
        try:
            return kind.model_validate(body, context={"limits": self._host.limits})
        except ValidationError as error:
            raise field_error(error, {*kind.model_fields, *kind.not_served}) from None

    def owner(self, request: Request) -> str:
        owner: str = request.scope.get(OWNER, "")
        return owner

    async def race(self, request: Request, work: Awaitable[T]) -> T:
        return await race(request.receive, work)

    def events(self, frames: AsyncIterator[bytes]) -> Response:
        return EventStream(frames)

    def forward(self, path: str) -> Response:
        return self._host.batches.forward(path)

    @property
    def load(self) -> int:
        return self._host.metrics.in_flight

    def counts(self) -> RequestCounts:
        return self._host.metrics.counts()


class ClientControl:
    """Implements `frame.interfaces.EngineControl` for a host, over its engine client."""

    def __init__(self, host: ServingHost) -> None:
        self._host = host
        self._stats = EngineStats()

    @property
    def error(self) -> str | None:
        return self._host.error

    async def control(self, method: str, arguments: dict[str, Any]) -> Any:
        if method == "shutdown":
            await self._host.shut_down()
            return None
        if method == "scale_elastic_ep" and (reason := refusal(self._host.config, arguments["new_data_parallel_size"])):
            raise RequestError(400, reason)
        if method == "is_scaling_elastic_ep" and not is_elastic(self._host.config):
            return False
        try:
            return await self._host.client.call(method, arguments)
        except ValueError as error:
            raise RequestError(400, str(error)) from None
        except EngineDeadError as error:
            raise RequestError(503, str(error)) from None
        except RuntimeError as error:
            raise RequestError(409, str(error)) from None

    async def stats(self) -> EngineStats:
        with contextlib.suppress(EngineDeadError, TimeoutError):  # it restarts, or is too busy to answer
            async with asyncio.timeout(_STATS_SECONDS):
                self._stats = await self._host.client.stats()
        if not self._stats.ranks:
            self._stats.rank, self._stats.problem = self._host.config.data_parallel.first_rank, self._host.client.error
        return self._stats

    @property
    def info(self) -> EngineInfo | None:
        with contextlib.suppress(EngineDeadError):
            return self._host.client.info
        return None
