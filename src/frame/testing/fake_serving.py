"""What the HTTP host gives to endpoints, without an engine: bytes are tokens, and every answer is the same."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, TypeVar

import msgspec
import numpy as np
from pydantic import ValidationError
from starlette.requests import Request
from starlette.responses import Response

from frame.core.front.logprobs import Logprob
from frame.core.front.output_parsers import OutputParsers
from frame.core.front.outputs import CompletionOutput, PoolingOutput, PoolingRequestOutput, RequestOutput
from frame.core.front.prompts import parse_prompt
from frame.core.front.turn import AssistantTurn
from frame.core.interfaces.client import EngineInfo
from frame.core.interfaces.endpoint import RequestError
from frame.core.interfaces.engine import EngineStats
from frame.core.interfaces.pooling_params import PoolingFacts, PoolingParams
from frame.core.interfaces.sampling import RequestOutputKind, SamplingParams
from frame.core.interfaces.schema import BoundedModel, Limits, SamplingFields
from frame.core.interfaces.serving import AdapterCard, Batches, RequestCounts
from frame.core.server.bodies import JSON_BODY
from frame.core.server.event_stream import EventStream, race
from frame.core.server.ingress import OWNER
from frame.core.server.metrics import ServerMetrics

T = TypeVar("T")
M = TypeVar("M", bound=BoundedModel)

#: The log-probability of each token, and how much less each further candidate has.
_LOGPROB, _STEP = -0.5, 1.0


def _scores(token_ids: list[int], count: int) -> list[dict[int, Logprob]]:
    """For each token its log-probability as the most probable one, and further ones up to `count` (-1: all)."""
    places = range(max(1, 256 if count == -1 else count))
    return [
        {
            (token + place) % 256: Logprob(_LOGPROB - _STEP * place, place + 1, chr((token + place) % 256))
            for place in places
        }
        for token in token_ids
    ]


@dataclass
class FakeServing:
    """Implements `frame.interfaces.Serving`, being each of its parts. `answer` is what every request is answered.

    `problem` is why none is.
    """

    answer: str = "ok, so"
    problem: str | None = None
    parsers: OutputParsers = field(default_factory=OutputParsers)
    created: int = 1_700_000_000
    fingerprint: str = "fp_test"

    def __post_init__(self) -> None:
        self.names = ["test-model"]
        self.calls: Any = None
        self.metrics = ServerMetrics()
        self.models = self.text = self.generation = self.http = self.engine = self
        #: (prompt, parameters) of every request
        self.requests: list[tuple[Any, Any]] = []

    @property
    def error(self) -> str | None:
        """None while requests are served, else why not."""
        return self.problem

    @property
    def limits(self) -> Limits:
        """Small bounds."""
        return Limits(
            max_model_len=512, vocab_size=256, max_logprobs=5, max_n=4, max_prompts=8, max_messages=16, max_stop=4,
            max_stop_length=32,
        )  # fmt: skip

    def parse(self, request: Request, kind: type[M]) -> M:
        """The JSON body as a bounded model; raises `RequestError` 400."""
        body = request.scope.get(JSON_BODY)
        if not isinstance(body, dict):
            raise RequestError(400, "the body must be a JSON object")
        try:
            return kind.model_validate(body, context={"limits": self.limits})
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or None
            raise RequestError(400, f"{where or 'the body'}: {first['msg']}", param=where) from None

    def owner(self, request: Request) -> str:
        """A digest of the key."""
        return str(request.scope.get(OWNER, ""))

    def served(self, name: str | None) -> str:
        """The name to answer with; raises `RequestError` 404 for another one."""
        if name not in (None, *self.names):
            raise RequestError(404, f"no model {name!r}; there are: test-model", param="model", code="model_not_found")
        return self.names[0]

    async def adapters(self) -> list[AdapterCard]:
        """None."""
        return []

    async def load_adapter(self, name: str, path: str, *, replace: bool = False) -> None:
        """Adapters are off."""
        raise RequestError(403, "adapters are off")

    async def unload_adapter(self, name: str) -> None:
        """No adapter is loaded."""
        raise RequestError(404, f"no adapter {name!r} is loaded")

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """The bytes of the text."""
        del add_special_tokens
        return list(text.encode())

    async def detokenize(self, token_ids: list[int]) -> str:
        """The text of bytes."""
        if any(not 0 <= token < 256 for token in token_ids):
            raise RequestError(400, "token ids must be in [0, 256)", param="tokens")
        return bytes(token_ids).decode(errors="replace")

    def tokenizer_info(self) -> dict[str, Any]:
        """One setting."""
        return {"tokenizer_class": "Bytes"}

    def token_bytes(self, token_id: int) -> bytes:
        """One byte."""
        return bytes([token_id])

    async def chat_prompt(self, messages: list[Any], **options: Any) -> Any:
        """The contents of the messages, one a line."""
        del options
        text = "\n".join(str(message.get("content")) for message in messages)
        return SimpleNamespace(text=text, token_ids=list(text.encode()))

    def turn(self, **options: Any) -> AssistantTurn:
        """The turn of a chat, with `parsers`."""
        return self.parsers.turn(**options)

    def params(self, body: SamplingFields, **fields: Any) -> SamplingParams:
        """The parameters of a body; raises `RequestError` 400."""
        try:
            return body.sampling(SamplingParams(), **fields)
        except ValueError as error:
            raise RequestError(400, str(error)) from None

    async def generate(
        self, prompt: Any, params: SamplingParams, request_id: str, **options: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """The answer, a word an output or whole, for each of n, with log-probabilities where they are asked for."""
        del options
        self.requests.append((prompt, params))
        whole = params.output_kind == RequestOutputKind.FINAL_ONLY
        words = [self.answer] if whole else self.answer.split(" ")
        for position, word in enumerate(words):
            last = position == len(words) - 1
            text = word if last else f"{word} "
            token_ids = list(text.encode())
            scores = None if params.logprobs is None else _scores(token_ids, params.logprobs)
            outputs = [
                CompletionOutput(
                    index=index,
                    text=text,
                    token_ids=token_ids,
                    finish_reason="stop" if last else None,
                    logprobs=scores,
                    cumulative_logprob=None if scores is None else _LOGPROB * len(token_ids),
                )
                for index in range(params.n)
            ]
            prompt_scores: list[dict[int, Logprob] | None] | None = None
            if params.prompt_logprobs is not None and position == 0:
                prompt_scores = [None, *_scores([2, 3], params.prompt_logprobs)]
            yield RequestOutput(request_id, None, [1, 2, 3], prompt_scores, outputs, last, num_cached_tokens=0)

    @property
    def pooling(self) -> PoolingFacts:
        """Everything."""
        tasks: list[Any] = ["embed", "classify", "score", "token_embed", "token_classify", "reward", "encode"]
        return PoolingFacts(tasks=tasks, size=3, labels=["no", "yes", "maybe"])

    def require(self, task: str) -> None:
        """Everything can be done."""

    async def pool(self, prompt: Any, params: PoolingParams, request_id: str, **options: Any) -> Any:
        """Three numbers for every prompt."""
        del options
        self.requests.append((prompt, params))
        row = PoolingOutput(np.array([0.25, 0.5, 0.25], np.float32))
        return PoolingRequestOutput(request_id, row, [1, 2, 3], 0)

    async def pair(self, first: str, second: str, params: PoolingParams, cache_salt: str | None = None) -> Any:
        """Both texts, with a space between them."""
        del params
        return msgspec.structs.replace(parse_prompt(f"{first} {second}"), salt=cache_salt)

    @property
    def batches(self) -> Batches:
        """The routes, once an application was built."""
        if self.calls is None:
            raise RequestError(503, "the routes are not there yet")
        batches: Batches = self.calls
        return batches

    async def control(self, method: str, arguments: dict[str, Any]) -> Any:
        """What was asked for, as the answer."""
        return 0 if method == "pause" else bool(arguments)

    def forward(self, path: str) -> Response:
        """What the POST route `path` answers."""
        routes: Any = self.batches
        response: Response = routes.forward(path)
        return response

    async def race(self, request: Request, work: Awaitable[T]) -> T:
        """Awaits `work`, and cancels it when the client hangs up."""
        return await race(request.receive, work)

    def events(self, frames: AsyncIterator[bytes]) -> Response:
        """Server-sent events."""
        return EventStream(frames)

    async def stats(self) -> EngineStats:
        """Nothing happened yet."""
        return EngineStats()

    @property
    def load(self) -> int:
        """One request, the one that asks."""
        return 1

    @property
    def info(self) -> EngineInfo | None:
        """None, as before an engine was ready."""
        return None

    def counts(self) -> RequestCounts:
        """Nothing was counted yet."""
        return self.metrics.counts()
