"""What endpoints get from the HTTP host: `frame.interfaces.Serving`, over the text side and an engine client.

Knows no route and no wire format of an API.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import (
    AsyncGenerator,
    AsyncIterator,
    Awaitable,
    Callable,
    Collection,
    Iterable,
)
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ..config.tree import FrameConfig
from ..front.turn import AssistantTurn, OutputParsers
from ..interfaces.client import EngineDeadError
from ..interfaces.endpoint import RequestError
from ..interfaces.engine import EngineStats
from ..interfaces.pooling_params import PoolingFacts, PoolingParams
from ..interfaces.sampling import SamplingParams
from ..interfaces.schema import BoundedModel, Limits, SamplingFields
from ..processes.client import RemoteEngine
from .batch_lines import BatchLines, LineResult, batch_routes
from .client_disconnect import event_stream, race_request
from .ingress import JSON_BODY, OWNER
from .metrics import ServerMetrics
from .prompt_texts import PromptTexts
from .refusals import IgnoredFields, field_error, refusals
from .reports import Reporter
from .scoring import score_texts
from .watched_runs import WatchedRuns

if TYPE_CHECKING:
    from ..front.async_llm import AsyncLLM
    from .calls import RouteCalls

T = TypeVar("T")
M = TypeVar("M", bound=BoundedModel)

_STATS_SECONDS = 2.0


async def _no_parent() -> None:
    raise RequestError(409, "this process has no parent that it could ask to stop")


def model_names(config: FrameConfig) -> list[str]:
    """The names that requests may use: those set, else the model's as given (the demo model is "demo")."""
    if config.model.served_model_name:
        return list(config.model.served_model_name)
    name = config.model.model
    if not name:
        return ["demo"]
    return [name if not Path(name).is_absolute() else Path(name).name or name, name][: 2 if name[0] == "/" else 1]


class ServingHost:
    """One for each API process. `llm` is given when the engine is ready for the first time."""

    def __init__(self, config: FrameConfig, client: RemoteEngine, metrics_file: int | None = None) -> None:
        self.config = config
        self.model_names = model_names(config)
        self.created = int(time.time())
        self.draining = False
        #: the stage of the start-up that the engine is in
        self.stage: str | None = None
        self.metrics = ServerMetrics(
            self.model_names[0], vllm_names=config.observability.vllm_metrics, file=metrics_file
        )
        #: the routes, once the application is built
        self.calls: RouteCalls | None = None
        self.reporter = Reporter(self.model_names[0])
        self._client = client
        #: asks the parent to stop the server
        self.shut_down: Callable[[], Awaitable[None]] = _no_parent
        self._llm: AsyncLLM | None = None
        self._limits: Limits | None = None
        self._parsers: OutputParsers | None = None
        self._stats = EngineStats()
        self._runs = WatchedRuns(self)
        self._texts = PromptTexts(self)
        seed = f"{version('frame-llm')} {config.model.model_dump_json(exclude={'logits_processors'})}"
        self.fingerprint = f"fp_{hashlib.sha256(seed.encode()).hexdigest()[:12]}"

    def open(self, llm: AsyncLLM, parsers: OutputParsers) -> None:
        """Starts to serve."""
        self._parsers = parsers
        info, server = self._client.info, self.config.server
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

    def close(self) -> None:
        """Ends what it has started."""
        self._texts.close()

    @property
    def llm(self) -> AsyncLLM:
        """The text side; raises `RequestError` 503 before the engine was ready."""
        if self._llm is None:
            raise RequestError(503, self.error or "the engine is starting")
        return self._llm

    @property
    def limits(self) -> Limits:
        """Bounds of request fields; raises as `llm` does."""
        if self._limits is None:
            raise RequestError(503, self.error or "the engine is starting")
        return self._limits

    @property
    def error(self) -> str | None:
        """None while requests are served, else why not."""
        if self.draining:
            return "the server is stopping"
        if self._client.error is not None:
            stage = f" (stage: {self.stage})" if self.stage is not None else ""
            return f"{self._client.error}{stage}"
        return "the tokenizer is loading" if self._llm is None else None

    @property
    def end(self) -> str | None:
        """Why nothing will be served any more; None while that may be."""
        return self._client.end

    @property
    def problem(self) -> str | None:
        """None while requests are taken in, else why not: those that come while the engine restarts wait for it."""
        if self.draining:
            return "the server is stopping"
        if self._llm is None:
            return self.error
        most = self.config.scheduler.max_queue
        if self._client.error is not None and self._llm.front.num_unfinished >= most:
            return f"{self._client.error}, and {most} requests wait for it already (--max-queue)"
        return self._client.end

    def parse(self, request: Request, kind: type[M]) -> M:
        """The JSON body as a bounded model; raises `RequestError` 400 naming the field."""
        body = request.scope.get(JSON_BODY)
        if not isinstance(body, dict):
            raise RequestError(400, "the body must be a JSON object")
        try:
            return kind.model_validate(body, context={"limits": self.limits})
        except ValidationError as error:
            raise field_error(error, {*kind.model_fields, *kind.not_served}) from None

    def owner(self, request: Request) -> str:
        """Whom a request's things belong to: a digest of its API key, "" on an open server."""
        owner: str = request.scope.get(OWNER, "")
        return owner

    def model(self, name: str | None) -> str:
        """The name to answer with; raises `RequestError` 404 for a model that is not served."""
        if name is None:
            return self.model_names[0]
        if name not in self.model_names:
            raise RequestError(
                404,
                f"no model {name[:200]!r}; there are: {', '.join(self.model_names)}",
                param="model",
                code="model_not_found",
            )
        return name

    def turn(self, **options: Any) -> AssistantTurn:
        """What the assistant may do in answer to a chat, and how its output is read."""
        if self._parsers is None:
            raise RequestError(503, self.error or "the engine is starting")
        return self._parsers.turn(**options)

    def params(self, body: SamplingFields, **fields: Any) -> SamplingParams:
        """The sampling parameters of a body over the checkpoint's defaults; `fields` are what the route sets itself."""
        with refusals():
            return body.sampling(self.llm.get_default_sampling_params(), **fields)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises `ValueError` without a tokenizer."""
        return await self._texts.tokenize(text, add_special_tokens)

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        return await self._texts.detokenize(token_ids)

    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's settings as `tokenizer_config.json` has them; raises `RequestError` without a tokenizer."""
        return self._texts.tokenizer_info()

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character; its number where there is no tokenizer."""
        return self._texts.token_bytes(token_id)

    async def chat_prompt(self, messages: list[Any], **options: Any) -> Any:
        """A chat as a prompt for `generate`; raises `ValueError` naming what the template cannot take."""
        return await self._texts.chat_prompt(messages, **options)

    def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """A stream of `RequestOutput`, each with what is new; raises `RequestError` when the request fails."""
        return self._runs.generate(prompt, params, request_id, **options)

    @property
    def pooling(self) -> PoolingFacts | None:
        """What a pooling model can do; None for one that generates."""
        return self.llm.front.pooling

    def require(self, task: str) -> None:
        """Raises `RequestError` 400 unless the model does `task`."""
        with refusals():
            self.llm.front.require(task)

    async def pool(self, prompt: Any, params: PoolingParams, request_id: str, **options: Any) -> Any:
        """The `PoolingRequestOutput` of one prompt; raises `RequestError` when the request fails."""
        return await self._runs.pool(prompt, params, request_id, **options)

    async def scores(
        self, first: list[str], second: list[str], params: PoolingParams, name: str, **options: Any
    ) -> Any:
        """How well first[i] and second[i] fit, as `Score`s; raises `RequestError`."""
        return await score_texts(self, self.llm, first, second, params, name, options)

    @property
    def batch_routes(self) -> list[str]:
        """Paths that lines of a batch file may ask."""
        return [] if self.calls is None else batch_routes(self.calls)

    def check_lines(self, lines: BinaryIO, *, url: str, max_lines: int) -> tuple[int, list[dict[str, Any]]]:
        """How many lines of a batch file ask something, and what is wrong with them; takes its time in a thread."""
        return self._lines("", url).check(lines, max_lines)

    def run_lines(
        self, lines: Iterable[bytes], *, owner: str, url: str, done: Collection[str], stopped: Callable[[], bool]
    ) -> AsyncGenerator[LineResult, None]:
        """Runs the lines of a batch file through the route `url`."""
        return self._lines(owner, url).run(lines, done, stopped)

    def _lines(self, owner: str, url: str) -> BatchLines:
        if self.calls is None:
            raise RequestError(503, "the routes are not there yet")
        return BatchLines(self.calls, max_line_bytes=self.config.server.max_body_bytes, owner=owner, url=url)

    async def control(self, method: str, arguments: dict[str, Any]) -> Any:
        """Tells the engine, or the server ("shutdown"); raises `RequestError` with what it says."""
        if method == "shutdown":
            await self.shut_down()
            return None
        try:
            return await self._client.call(method, arguments)
        except EngineDeadError as error:
            raise RequestError(503, str(error)) from None
        except RuntimeError as error:
            raise RequestError(409, str(error)) from None

    def forward(self, path: str) -> Response:
        """What the POST route `path` answers to the request that gets this response, checked as it is already."""
        if self.calls is None:
            raise RequestError(503, "the routes are not there yet")
        return self.calls.forward(path)

    async def race(self, request: Request, work: Awaitable[T]) -> T:
        """Awaits `work`, and cancels it when the client hangs up."""
        return await race_request(request, work)

    def events(self, frames: AsyncIterator[bytes]) -> Response:
        """Server-sent events from ready-made frames."""
        return event_stream(frames)

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine; the last known ones while it is away or too busy."""
        with contextlib.suppress(EngineDeadError, TimeoutError):
            self._stats = await asyncio.wait_for(self._client.stats(), _STATS_SECONDS)
        return self._stats

    def exposition(self, stats: EngineStats) -> bytes:
        """All metrics in the Prometheus text format."""
        return self.metrics.exposition(stats, self._client.known_info)

    @property
    def load(self) -> int:
        """HTTP requests that are being answered, in all API processes."""
        return self.metrics.in_flight
