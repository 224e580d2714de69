"""A front for asyncio programs: streams the outputs of each request over the client of an engine.

When an engine dies, its requests continue on the next engine from the last token that their streams received. Only one
event loop may use it.
"""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import suppress
from typing import Any, TypeVar

from frame.links.prompt_embeds import check_accepted

from ..config.checkpoint import Checkpoint
from ..config.tree import FrameConfig
from ..interfaces.adapters import AdapterSource
from ..interfaces.client import EngineClient, EngineDeadError
from ..interfaces.engine import EngineOutput, Fault
from ..interfaces.pooling_params import PoolingParams
from ..interfaces.sampling import RequestOutputKind, SamplingParams
from ..interfaces.tokenizer import ChatOptions
from ..plugin_host.logits_processors import request_check
from ..plugin_host.registry import Registry
from .collector import Collector
from .front import Front
from .outputs import RequestOutput
from .prompts import InvalidRequest, ParsedPrompt, parse_prompt
from .template import text_size
from .tokenizer import TokenizerSource

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: texts of at least this many characters are tokenised on a thread, so that other streams go on
_LONG_TEXT = 8192


class AsyncFront:
    """A `Front` whose outputs are streamed. It reads the outputs of `client` from the first request on.

    `client` belongs to the caller. `tokenizer` may be passed while it still loads.
    """

    def __init__(
        self,
        config: FrameConfig,
        client: EngineClient,
        checkpoint: Checkpoint,
        registry: Registry,
        tokenizer: TokenizerSource | None = None,
    ) -> None:
        checks = [_refuse_callables, request_check(config, registry)]
        tokenizer = tokenizer or TokenizerSource(config, checkpoint, registry)
        self.front = Front(config, checkpoint, client.info, tokenizer=tokenizer, validators=checks)
        #: requests that were continued on another engine
        self.num_replayed = 0
        self._client = client
        self._collectors: dict[str, Collector] = {}
        self._reader: asyncio.Task[None] | None = None
        self._replays: set[asyncio.Task[None]] = set()
        self._stopped = False
        self._short_texts = asyncio.Lock()

    async def stream(
        self,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        request_id: str,
        *,
        priority: int = 0,
        kv_transfer: dict[str, Any] | None = None,
        owner: str = "",
        adapter: AdapterSource | None = None,
        follows: str | None = None,
    ) -> AsyncGenerator[Any, None]:
        """Streams the outputs of one request, as its `output_kind` says, until one is `finished`.

        They are `RequestOutput`s, or one `PoolingRequestOutput`. Cancelling the task or closing the generator aborts
        the request. Raises `InvalidRequest` for a request that cannot be served, `EngineDeadError` when there is no
        engine and none will be started; when the engine dies, the stream goes on with the next one, or ends with
        finish_reason "error" when there is none. With scheduling_policy "fair" each `owner` gets an equal share.
        `adapter` is loaded, by `load_adapter`. `follows` is that of `EngineRequest`.
        """
        if self._stopped:
            raise EngineDeadError("the engine was shut down")
        if self._reader is None or self._reader.done():
            self._reader = asyncio.get_running_loop().create_task(_read_outputs(self._client, weakref.ref(self)))
        check_accepted(prompt, self.front.info.embed_size)
        parsed = parse_prompt(prompt)
        if parsed.token_ids is None or parsed.encoder is not None:
            text = (parsed.encoder or parsed).text or ""
            parsed = await self._off_loop(len(text), self.front.tokenize, parsed, params)
        options: dict[str, Any] = {"priority": priority, "kv_transfer": kv_transfer, "owner": owner}
        requests = self.front.submit(request_id, parsed, params, adapter=adapter, follows=follows, **options)
        collector = Collector(params.output_kind == RequestOutputKind.DELTA)
        self._collectors[request_id] = collector
        finished = False
        try:
            for request in requests:
                await self._client.add(request)
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            self._collectors.pop(request_id, None)
            if not finished:
                await self.abort(request_id)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their streams end with finish_reason "abort". Unknown ids are ignored."""
        outputs, ended = self.front.abort([request_id] if isinstance(request_id, str) else request_id)
        self._deliver(outputs)
        if ended:
            with suppress(EngineDeadError):
                await self._client.abort(ended)

    async def pair(self, first: str, second: str, params: PoolingParams) -> ParsedPrompt:
        """Joins two texts into one prompt for a reranker."""
        return await self._off_loop(len(first) + len(second), self.front.pair, first, second, params)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises `InvalidRequest` without a tokenizer and for a text that is far too long."""
        return await self._off_loop(len(text), self.front.encode, text, add_special_tokens)

    async def render_chat(self, messages: list[Any], options: ChatOptions) -> ParsedPrompt:
        """Renders a conversation as a prompt; raises `InvalidRequest` naming what the template does not accept."""
        return await self._off_loop(text_size(messages), self.front.render_chat, messages, options)

    def shutdown(self) -> None:
        """Ends every stream as aborted, without a message to the engine, and reads no more. May be called twice."""
        self._stopped = True
        outputs, _ = self.front.abort(list(self._collectors))
        self._deliver(outputs)
        if self._reader is not None:
            with suppress(RuntimeError):  # its loop may be closed
                self._reader.cancel()

    async def _off_loop(self, num_chars: int, work: Callable[..., T], *args: Any) -> T:
        """Runs text work without delaying streams.

        On a thread for long texts, one short text per turn of the event loop.
        """
        if num_chars >= _LONG_TEXT:
            return await asyncio.to_thread(work, *args)
        async with self._short_texts:
            await asyncio.sleep(0)
            return work(*args)

    async def _read(self, batch: list[EngineOutput]) -> None:
        """Turns a batch of engine outputs into request outputs."""
        if batch and batch[0].fault == "lost":  # other outputs are read while the requests are added again
            task = asyncio.get_running_loop().create_task(self._replay([one.request_id for one in batch]))
            self._replays.add(task)
            task.add_done_callback(self._replays.discard)
        else:
            await self._take(batch)

    def _fail(self, error: Exception) -> None:
        """Ends every stream with an error."""
        for collector in self._collectors.values():
            collector.fail(error)

    async def _take(self, batch: Iterable[EngineOutput]) -> None:
        outputs, ended = self.front.process(batch)
        self._deliver(outputs)
        if ended:
            await self._client.abort(ended)

    async def _replay(self, request_ids: list[str]) -> None:
        """Submits the requests of an engine that died to the next engine."""
        for position, request_id in enumerate(request_ids):
            try:
                request = self.front.replay(request_id)
                if request is not None:
                    await self._client.add(request)
                    self.num_replayed += 1
            except (EngineDeadError, ValueError) as error:
                fault: Fault = "engine" if isinstance(error, EngineDeadError) else "request"
                rest = request_ids[position:] if fault == "engine" else [request_id]
                await self._take(
                    EngineOutput(request_id=name, finish_reason="error", error=str(error), fault=fault) for name in rest
                )
                if fault == "engine":
                    return

    def _deliver(self, outputs: Iterable[RequestOutput]) -> None:
        for output in outputs:
            collector = self._collectors.get(output.request_id)
            if collector is not None:
                collector.put(output)


async def _read_outputs(client: EngineClient, front_of: Callable[[], AsyncFront | None]) -> None:
    """Passes engine outputs to a front until the client is closed, or the front is deleted.

    Between two batches nothing here refers to the front, so that one that nobody uses any more can be deleted.
    """
    error: Exception = EngineDeadError("the engine's client was closed")
    try:
        async for batch in client.outputs():
            if (front := front_of()) is None:
                return
            await front._read(batch)
            del front
    except Exception as cause:
        logger.exception("the text side failed")
        error = EngineDeadError(f"the text side failed: {type(cause).__name__}: {cause}")
    if (front := front_of()) is not None:
        front._fail(error)


def _refuse_callables(params: SamplingParams) -> None:
    if params.logits_processors:
        raise InvalidRequest(
            "logits_processors are callables and stay in one process: load a logits processor plugin, or use LLM",
            "logits_processors",
        )
