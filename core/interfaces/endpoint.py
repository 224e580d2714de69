"""Extension points of the command line and of the HTTP server. Knows no engine: it is given a client."""

from __future__ import annotations

import argparse
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable
from typing import TYPE_CHECKING, Any, BinaryIO, ClassVar, Protocol, TypeVar

from .errors import ErrorShape, RequestError

if TYPE_CHECKING:
    from fastapi import APIRouter, Request, Response

    from .engine import EngineStats
    from .pooling_params import PoolingFacts, PoolingParams
    from .sampling import SamplingParams
    from .schema import BoundedModel, Limits, SamplingFields
    from .turn import Turn

    M = TypeVar("M", bound=BoundedModel)

T = TypeVar("T")

__all__ = ["Command", "Endpoint", "ErrorShape", "RequestError", "Serving"]


class Serving(Protocol):
    """What the HTTP host gives to endpoints: the models, the front, and the rules that every route shares.

    What needs the engine raises `RequestError` 503 until it was ready once. `model_names` are the served names,
    `created` is the start of the process in Unix seconds, `fingerprint` names version and configuration.
    """

    model_names: list[str]
    created: int
    fingerprint: str

    @property
    def limits(self) -> Limits:
        """Bounds of request fields."""

    @property
    def error(self) -> str | None:
        """None while requests are served, else why not."""

    def parse(self, request: Request, kind: type[M]) -> M:
        """The JSON body as a bounded model; raises `RequestError` 400 naming the field."""

    def owner(self, request: Request) -> str:
        """Whom a request's things belong to: a digest of its API key, "" on an open server."""

    def model(self, name: str | None) -> str:
        """The name to answer with; None means the first. Raises `RequestError` 404 for a model that is not served."""

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises `RequestError` without a tokenizer."""

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of token ids, special tokens included."""

    def tokenizer_info(self) -> dict[str, Any]:
        """The tokenizer's settings as `tokenizer_config.json` has them, without paths of this machine.

        With the chat template that chats are rendered by. Raises `RequestError` without a tokenizer.
        """

    def token_bytes(self, token_id: int) -> bytes:
        """The UTF-8 bytes of one token, which may be a part of a character."""

    async def chat_prompt(self, messages: list[Any], **options: Any) -> Any:
        """A chat as a prompt for `generate`, with `text` and `token_ids`; `options` are those of the front's templates.

        Raises `RequestError` naming what the template cannot take.
        """

    def turn(self, *, tools: Any = None, tool_choice: Any = None, **options: Any) -> Turn:
        """What the assistant may do in answer to a chat, and how its output is read: see `Turn`.

        `tools` and `tool_choice` are in OpenAI's chat form. `options`: `parallel` (False: one call at most),
        `include_reasoning` (False: it is left out), `template_kwargs`. Raises `RequestError` 400 naming the field.
        """

    def params(self, body: SamplingFields, **fields: Any) -> SamplingParams:
        """The sampling parameters of a body over the checkpoint's defaults; `fields` are what the route sets itself.

        Raises `RequestError` 400 for values that contradict each other.
        """

    def generate(self, prompt: Any, params: SamplingParams, request_id: str, **options: Any) -> AsyncIterator[Any]:
        """A stream of `RequestOutput`, each with what is new; raises `RequestError` when the request fails.

        `options` are keywords of `AsyncLLM.generate`, such as `priority`. Closing the stream aborts the request.
        """

    @property
    def pooling(self) -> PoolingFacts | None:
        """What a pooling model can do; None for one that generates."""

    def require(self, task: str) -> None:
        """Raises `RequestError` 400 unless the model does `task`: "generate" or one of `PoolingParams.task`."""

    async def pool(self, prompt: Any, params: PoolingParams, request_id: str, **options: Any) -> Any:
        """The `PoolingRequestOutput` of one prompt, with `outputs.data` float32; raises `RequestError` when it fails.

        `options` are keywords of `generate`.
        """

    async def scores(
        self, first: list[str], second: list[str], params: PoolingParams, name: str, **options: Any
    ) -> Any:
        """How well first[i] and second[i] fit: for each pair an object with `value` and `num_tokens`.

        By the model's own scores, or for an embedding model by the cosine of two embeddings. `options` are those of
        `pool`, and `cache_salt`.
        """

    @property
    def batch_routes(self) -> list[str]:
        """Paths that lines of a batch file may ask: the POST routes without parameters that take JSON."""

    def check_lines(self, lines: BinaryIO, *, url: str, max_lines: int) -> tuple[int, list[dict[str, Any]]]:
        """How many lines of a batch file for the route `url` ask something, and what is wrong with them.

        Called in a thread. A problem has OpenAI's form: `code`, `line`, `message`, `param`.
        """

    def run_lines(
        self, lines: Iterable[bytes], *, owner: str, url: str, done: Collection[str], stopped: Callable[[], bool]
    ) -> AsyncIterator[Any]:
        """Runs the lines of a batch file through the route `url`, as `owner`, many at a time.

        Yields a result as each line ends: `line` (the JSON of the result), `succeeded`, and `unserved` when it is worth
        another try. Lines whose result's id is in `done` are left out; nothing new starts once `stopped`.
        """

    async def control(self, method: str, arguments: dict[str, Any]) -> Any:
        """Tells the engine, by the names of `EngineCore.call`, or the server ("shutdown"); for admin endpoints.

        Raises `RequestError` with what the engine says.
        """

    def forward(self, path: str) -> Response:
        """What the POST route `path` answers to the request that gets this response, checked as it is already."""

    async def race(self, request: Request, work: Awaitable[T]) -> T:
        """Awaits `work`, and cancels it when the client hangs up."""

    def events(self, frames: AsyncIterator[bytes]) -> Response:
        """Server-sent events from ready-made frames; closes `frames` when the client hangs up."""

    async def stats(self) -> EngineStats:
        """Counters and gauges of the engine; the last known ones while it is away."""

    def exposition(self, stats: EngineStats) -> bytes:
        """All metrics in the Prometheus text format."""

    @property
    def load(self) -> int:
        """HTTP requests that are being answered, in all API processes."""


class Endpoint(ABC):
    """HTTP routes. Built as `Class(config=…, options=…, serving=…)` in each API process.

    `serving` offers the models, the front and the error shape (`frame.interfaces.Serving`). Every route is behind the
    API key and the body limits without doing anything for it, and its errors, the host's own too, have the shape
    `errors`.
    """

    errors: ClassVar[ErrorShape] = ErrorShape()
    #: True: these routes are on the admin listener, which has its own address and keys, and not on the public one
    admin: ClassVar[bool] = False
    #: which servers have these routes: "text" is a usual one, "tokens" one under --tokens-only, without a tokenizer
    modes: ClassVar[frozenset[str]] = frozenset(("text",))
    #: exact paths that GET answers without a key: files that are the same for everybody and tell nothing of this server
    public_paths: tuple[str, ...] = ()
    #: exact paths whose POST takes a form with files (multipart/form-data), of at most --max-upload-bytes
    uploads: tuple[str, ...] = ()

    def __init__(self, *, config: Any, options: Any = None, serving: Any) -> None:
        self.config = config
        self.options = options
        self.serving = serving

    @abstractmethod
    def router(self) -> APIRouter:
        """The routes, mounted at the root."""


class Command(ABC):
    """A subcommand of `frame`. Built as `Class(config=None, options=None)`; imports heavy things inside `run` only."""

    #: one line for `frame --help`
    help: str
    #: command lines that its own `--help` ends with
    examples: tuple[str, ...] = ()

    def __init__(self, *, config: Any = None, options: Any = None) -> None:
        self.config = config
        self.options = options

    @abstractmethod
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Declares its arguments."""

    @abstractmethod
    def run(self, arguments: argparse.Namespace) -> int:
        """Does it; returns the exit status."""
