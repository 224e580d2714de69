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
    Iterator,
)
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from ..config.tree import FrameConfig
from ..interfaces.client import EngineDeadError
from ..interfaces.endpoint import RequestError
from ..interfaces.engine import EngineStats, Fault
from ..interfaces.pooling_params import PoolingFacts, PoolingParams
from ..interfaces.sampling import SamplingParams
from ..interfaces.schema import BoundedModel, Limits, SamplingFields
from .batch_lines import BatchLines, LineResult, batch_routes
from .client import RemoteEngine
from .deadlines import until_deadline
from .ingress import JSON_BODY, OWNER, REQUEST
from .metrics import ServerMetrics
from .refusals import field_error, refusal, refusals
from .reports import Notes, Reporter
from .request_timer import RequestTimer
from .scoring import score_texts
from .streams import event_stream, race_request
from .turn import AssistantTurn, OutputParsers

if TYPE_CHECKING:
    from ..front.async_llm import AsyncLLM
    from ..front.template_process import TemplateProcesses
    from .calls import RouteCalls

T = TypeVar("T")
#: What metrics read of a request that generates nothing.
_POOLED = SamplingParams(max_tokens=1)
M = TypeVar("M", bound=BoundedModel)

_STATS_SECONDS = 2.0
#: Where an error lies -> HTTP status.
_STATUS = {"request": 400, "load": 429, "engine": 500}


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
        self._templates: TemplateProcesses | None = None
        self._limits: Limits | None = None
        self._parsers: OutputParsers | None = None
        self._stats = EngineStats()
        seed = f"{version('frame-llm')} {config.model.model_dump_json(exclude={'logits_processors'})}"
        self.fingerprint = f"fp_{hashlib.sha256(seed.encode()).hexdigest()[:12]}"

    def open(self, llm: AsyncLLM, parsers: OutputParsers) -> None:
        """Starts to serve."""
        self._parsers = parsers
        info, server = self._client.info, self.config.server
        self._llm = llm
        self._templates = self._make_templates()
        self._limits = Limits(
            max_model_len=info.max_model_len,
            vocab_size=info.vocab_size,
            max_logprobs=self.config.model.max_logprobs,
            max_n=server.max_n,
            max_prompts=server.max_prompts,
            max_messages=server.max_messages,
            max_stop=server.max_stop,
            max_stop_length=server.max_stop_length,
            strict_fields=server.strict_fields,
            trust_request_chat_template=server.trust_request_chat_template,
        )

    def close(self) -> None:
        """Ends what it has started."""
        if self._templates is not None:
            self._templates.close()

    def _make_templates(self) -> TemplateProcesses | None:
        server = self.config.server
        if not (server.trust_request_chat_template or server.isolate_chat_template):
            return None
        from ..front.template_process import TemplateProcesses

        return TemplateProcesses(self.config)

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
        with refusals():
            return await self.llm.tokenize(text, add_special_tokens)

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""
        vocab_size = self.limits.vocab_size
        wrong = next((token for token in token_ids if not 0 <= token < vocab_size), None)
        if wrong is not None:
            raise RequestError(400, f"token id must be in [0, {vocab_size}), got {wrong}", param="tokens")
        with refusals():
            return await asyncio.to_thread(self.llm.tokenizer.decode, token_ids, False)

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character; its number where there is no tokenizer."""
        tokenizer = self.llm.front.source.get_or_none()
        if tokenizer is None:
            return f"token_id:{token_id}".encode()
        if tokenizer.pieces is not None:
            return bytes(tokenizer.pieces[token_id])
        return tokenizer.token_text(token_id).encode()

    async def chat_prompt(self, messages: list[Any], **options: Any) -> Any:
        """A chat as a prompt for `generate`; raises `ValueError` naming what the template cannot take."""
        from ..front.template import ChatOptions

        template = options.get("chat_template")
        if template is not None and "{{" not in template and "{%" not in template:
            raise RequestError(400, "chat_template must be a template, not a file", param="chat_template")
        with refusals():
            chat, front = ChatOptions(**options), self.llm.front
            if self._templates is not None and (template is not None or self.config.server.isolate_chat_template):
                return await self._templates.render(messages, front.with_template(chat), front.longest_chat)
            return await self.llm.render_chat(messages, chat)

    @contextlib.contextmanager
    def _failures(self, timer: RequestTimer, notes: Notes | None = None) -> Iterator[None]:
        """Notes how a request failed, and raises it as a `RequestError`."""
        try:
            yield
        except (EngineDeadError, RequestError, ValueError) as error:
            timer.ends("error")
            if notes is not None:
                notes.error = str(error)
            if isinstance(error, EngineDeadError):
                raise RequestError(503, str(error)) from None
            raise (refusal(error) if isinstance(error, ValueError) else error) from None

    def _failure(self, fault: Fault, error: str | None) -> RequestError:
        """What the engine says of a request that it ended."""
        return RequestError(_STATUS[fault] if self._client.end is None else 503, error or "the engine failed")

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """A stream of `RequestOutput`, each with what is new; raises `RequestError` when the request fails."""
        timer = RequestTimer(self.metrics, params)
        notes = self.reporter.begin(request_id, params)
        stream = self.llm.generate(prompt, params, request_id, **options)
        first = True
        try:
            with self._failures(timer, notes):
                async for output in until_deadline(stream, REQUEST.get()):
                    if first:
                        first = False
                        timer.prompt(len(output.prompt_token_ids or ()), output.num_cached_tokens or 0)
                    if notes is not None:
                        notes.see(output)
                    self._observe(timer, output)
                    yield output
        finally:
            timer.close()
            if notes is not None:
                self.reporter.end(notes, timer)
            await stream.aclose()

    def _observe(self, timer: RequestTimer, output: Any) -> None:
        count = longest = 0
        for completion in output.outputs:
            new = len(completion.token_ids)
            count += new
            if new > longest:
                longest = new
            if completion.finish_reason is None:
                continue
            if completion.finish_reason == "error":
                raise self._failure(completion.fault, completion.error)
            if output.finished:
                timer.ends(completion.finish_reason)
        if count:
            timer.tokens(count, longest, output.metrics)

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
        timer = RequestTimer(self.metrics, _POOLED)
        stream = self.llm.encode(prompt, params, request_id, **options)
        try:
            with self._failures(timer):
                output = await anext(until_deadline(stream, REQUEST.get()))
                timer.prompt(len(output.prompt_token_ids), output.num_cached_tokens or 0)
                if output.outputs.error is not None:
                    raise self._failure(output.outputs.fault, output.outputs.error)
                timer.ends("stop")
                return output
        finally:
            timer.close()
            await stream.aclose()

    async def scores(
        self, first: list[str], second: list[str], params: PoolingParams, name: str, **options: Any
    ) -> Any:
        """How well first[i] and second[i] fit, as `Score`s; raises `RequestError`."""
        return await score_texts(self, self.llm, first, second, params, name, options)

    @property
    def batch_routes(self) -> list[str]:
        """Paths that lines of a batch file may ask."""
        return [] if self.calls is None else batch_routes(self.calls)

    def run_lines(
        self, lines: Iterable[bytes], *, owner: str, url: str, done: Collection[str], stopped: Callable[[], bool]
    ) -> AsyncGenerator[LineResult, None]:
        """Runs the lines of a batch file through the route `url`."""
        if self.calls is None:
            raise RequestError(503, "the routes are not there yet")
        batch = BatchLines(self.calls, max_line_bytes=self.config.server.max_body_bytes, owner=owner, url=url)
        return batch.run(lines, done, stopped)

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
