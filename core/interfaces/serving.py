"""What the HTTP server offers to endpoints, by noun: models, text, generation, http, engine, batches."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from fastapi import Request, Response

    from .client import EngineInfo
    from .engine import EngineStats
    from .pooling_params import PoolingFacts, PoolingParams
    from .sampling import SamplingParams
    from .schema import BoundedModel, Limits, SamplingFields
    from .turn import Turn

    M = TypeVar("M", bound=BoundedModel)

T = TypeVar("T")


class AdapterCard(NamedTuple):
    """An adapter that requests may name as their model: its folder, the model's name, when it was loaded (Unix s)."""

    name: str
    path: str
    parent: str
    created: int


class ServedModels(Protocol):
    """The names and limits of the served model.

    `created` is the start of the process in Unix seconds; `fingerprint` changes with version and settings. `limits`,
    `pooling` and `require` raise `RequestError` 503 until the engine was ready once.
    """

    names: list[str]
    created: int
    fingerprint: str

    @property
    def limits(self) -> Limits:
        """Bounds of request fields."""

    @property
    def pooling(self) -> PoolingFacts | None:
        """What a pooling model can do; None for one that generates."""

    def served(self, name: str | None) -> str:
        """Returns the name to answer with, for None the first. Raises `RequestError` 404 for another model."""

    async def adapters(self) -> list[AdapterCard]:
        """The adapters that are loaded, whose names `served` takes as well."""

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Loads an adapter, in place of one that has the name with `replace`; returns once requests may name it.

        Raises `RequestError`: 400 for one that does not fit or a name that is taken, 403 outside of `lora_root`, 404
        for no folder.
        """

    async def unload_adapter(self, name: str) -> None:
        """No further request gets the adapter, and those that run finish; raises `RequestError` 404 for none."""

    def require(self, task: str) -> None:
        """Raises `RequestError` 400 unless the model does `task`: "generate" or one of `PoolingParams.task`."""


class Texts(Protocol):
    """Tokenizer and templates. All calls raise `RequestError`: 503 before the engine was ready, 400 for bad input."""

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises `RequestError` without a tokenizer."""

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""

    def tokenizer_info(self) -> dict[str, Any]:
        """The settings of `tokenizer_config.json`, without paths of this machine, and the chat template in use.

        Raises `RequestError` without a tokenizer.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character."""

    async def chat_prompt(self, messages: list[Any], **options: Any) -> Any:
        """Returns a chat as prompt for `generate`, with `text` and `token_ids`; `options` are those of templates.

        Raises `RequestError` naming what the template cannot render.
        """

    async def pair(self, first: str, second: str, params: PoolingParams, cache_salt: str | None = None) -> Any:
        """Makes one prompt of two texts, for a cross-encoder; raises `RequestError` naming what is wrong."""

    def turn(self, *, tools: Any = None, tool_choice: Any = None, **options: Any) -> Turn:
        """Returns the assistant's `Turn`: which tools it may call in answer to a chat, and how its output is read.

        `tools` and `tool_choice` are in OpenAI's chat form. `options`: `parallel` (False: one call at most),
        `include_reasoning` (False: it is left out), `template_kwargs`. Raises `RequestError` 400 naming the field.
        """


class Generation(Protocol):
    """Requests to the engine. The server times each, reports it to metrics sinks, and ends it at its deadline."""

    def params(self, body: SamplingFields, **fields: Any) -> SamplingParams:
        """Returns the parameters of a body, else the checkpoint's defaults; `fields` are set by the route.

        Raises `RequestError` 400 for values that contradict each other.
        """

    def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[Any, None]:
        """Yields `RequestOutput`, each with what is new; raises `RequestError` when the request fails.

        `options` are `priority` and `kv_transfer`, as in `AsyncLLM.generate`. Closing the stream aborts the request.
        """

    async def pool(self, prompt: Any, params: PoolingParams, request_id: str, **options: Any) -> Any:
        """Returns the `PoolingRequestOutput` of one prompt, `outputs.data` being float32; may raise `RequestError`.

        `options` are keywords of `generate`.
        """


class Histogram(NamedTuple):
    """A distribution: `counts[i]` values lie above `bounds[i - 1]` and are at most `bounds[i]`, the last above all."""

    bounds: tuple[float, ...]
    counts: list[float]
    sum: float


class RequestCounts(NamedTuple):
    """Requests of a server since its start, by the names that `frame_…` metrics have.

    `counters` are tokens, `ends` requests by finish reason, `responses` HTTP responses by class ("2xx"). `histograms`
    are in seconds or tokens, as their names say. `in_flight` is as `HttpRequests.load`.
    """

    counters: dict[str, float]
    ends: dict[str, float]
    responses: dict[str, float]
    histograms: dict[str, Histogram]
    in_flight: int


class HttpRequests(Protocol):
    """A request's body, owner and connection, and the number of requests."""

    def parse(self, request: Request, kind: type[M]) -> M:
        """Returns the JSON body as a `kind`; raises `RequestError` 400 naming the field."""

    def owner(self, request: Request) -> str:
        """Returns whose request it is: a digest of its API key, "" on a server without keys."""

    async def race(self, request: Request, work: Awaitable[T]) -> T:
        """Awaits `work`, and cancels it when the client hangs up."""

    def events(self, frames: AsyncIterator[bytes]) -> Response:
        """Returns a stream of server-sent events, encoded in `frames`, which it closes when the client hangs up."""

    def forward(self, path: str) -> Response:
        """Returns what the POST route `path` answers to the present request, which is not checked again."""

    @property
    def load(self) -> int:
        """The number of HTTP requests that are being answered, in all API processes."""

    def counts(self) -> RequestCounts:
        """What all API processes have counted since the server started."""


class EngineControl(Protocol):
    """The engine's state, and calls of its control methods."""

    @property
    def error(self) -> str | None:
        """None while requests are served, else why not."""

    async def control(self, method: str, arguments: dict[str, Any]) -> Any:
        """Calls a method of the engine by name, such as "sleep", or of the server ("shutdown"); for admin endpoints.

        Raises `RequestError` with what the engine says.
        """

    async def stats(self) -> EngineStats:
        """Returns counters and gauges of the engine, the last known ones while it is restarted."""

    @property
    def info(self) -> EngineInfo | None:
        """Facts of the engine; None before the first one was ready."""


class RouteAnswer(NamedTuple):
    """Status and body of a call; `body` is None unless it is JSON."""

    status: int
    body: Any


class Batches(Protocol):
    """Calls of routes from inside the process, by the same handlers, bounds and errors as HTTP requests."""

    @property
    def paths(self) -> Sequence[str]:
        """The paths of POST routes that take JSON and have no parameters."""

    @property
    def max_body_bytes(self) -> int:
        """The largest body in bytes."""

    def parse(self, body: bytes) -> Any:
        """Returns the JSON of a body; raises `RequestError` 400 for what is none, or is beyond the bounds of bodies."""

    async def read(self, body: bytes) -> Any:
        """As `parse`, but parses large bodies one after the other in a thread."""

    def delay(self, owner: str) -> float:
        """Seconds until `owner` may use tokens again; 0 while it has some left. `post` does not wait for it."""

    async def post(self, path: str, body: dict[str, Any], owner: str) -> RouteAnswer:
        """Returns what the route answers to `owner`, refusals included. Cancelling it ends the request.

        From its first step on, `delay` counts the tokens that the request may use.
        """


class Serving(Protocol):
    """What an endpoint's setup gives it."""

    models: ServedModels
    text: Texts
    generation: Generation
    http: HttpRequests
    engine: EngineControl

    @property
    def batches(self) -> Batches:
        """The routes of all endpoints; raises `RequestError` 503 before they are mounted."""
