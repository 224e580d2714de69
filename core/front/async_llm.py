"""`AsyncLLM`: streaming inference for asyncio programs and for the HTTP server, over an engine in another process."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..config.checkpoint import Checkpoint, read_checkpoint
from ..config.errors import ConfigError
from ..config.tree import FrameConfig, ModelConfig
from ..interfaces.client import EngineClient, EngineDeadError
from ..interfaces.engine import EngineStats
from ..interfaces.pooling_params import PoolingParams
from ..interfaces.sampling import RequestOutputKind, SamplingParams
from ..plugin_host.model_sources import fetch_model
from ..plugin_host.registry import Registry
from ..processes.background_client import BackgroundEngine
from .front import Front, tokenizer_source
from .output_streams import RequestStreams
from .outputs import RequestOutput
from .pooled_outputs import PoolingOutput, PoolingRequestOutput
from .prompts import InvalidRequest, ParsedPrompt, parse_prompt
from .template import ChatOptions, text_size
from .tokenizer import Tokenizer, TokenizerSource
from .unserved import refuse_unserved, sleep_keeps

if TYPE_CHECKING:
    from frame.vllm_names.engine_args import AsyncEngineArgs

logger = logging.getLogger(__name__)

T = TypeVar("T")

#: texts of at least this many characters are tokenised on a thread, so that other streams go on
_LONG_TEXT = 8192
#: seconds between two checks whether the running requests of a paused engine have ended
_POLL_SECONDS = 0.02


class AsyncLLM:
    """A front over an `EngineClient`, whose outputs it reads from the first request on.

    When an engine dies, its requests continue on the next engine from the last token that their streams received. Only
    one event loop may use it. `client` belongs to the caller unless `from_engine_args` made it. `tokenizer` may be
    passed while it still loads.
    """

    def __init__(
        self,
        *given: Any,
        config: FrameConfig | None = None,
        client: EngineClient | None = None,
        checkpoint: Checkpoint | None = None,
        registry: Registry | None = None,
        tokenizer: TokenizerSource | None = None,
        **unknown: Any,
    ) -> None:
        if given or unknown or config is None or client is None:
            wrong = ", ".join([*(f"{one!r:.80}" for one in given), *map(repr, unknown)])
            raise ConfigError(
                "AsyncLLM takes the config and the client of a running engine, and checkpoint, registry and tokenizer, "
                f"but not {wrong or 'nothing'}; AsyncLLM.from_engine_args(AsyncEngineArgs(model=...)) starts an engine"
            )
        from ..plugin_host.logits_processors import request_check

        self.config = config
        self._client = client
        self._owned: BackgroundEngine | None = None
        check = request_check(config, registry if registry is not None else Registry.load())
        self.front = Front(
            config,
            checkpoint or read_checkpoint(config),
            client.info,
            tokenizer=tokenizer,
            validators=[_refuse_callables, check],
        )
        self._streams = RequestStreams(self.front, client)
        self._stopped = False
        self._short_texts = asyncio.Lock()

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Starts an engine process and waits until it is ready; raises one error with the root cause."""
        return cls.from_config(engine_args.create_engine_config())

    @classmethod
    def from_config(cls, config: FrameConfig) -> AsyncLLM:
        """Like `from_engine_args`, but takes a configuration tree."""
        config = fetch_model(config)
        checkpoint = read_checkpoint(config)
        tokenizer = tokenizer_source(config, checkpoint)
        tokenizer.preload()
        engine = BackgroundEngine(config)
        try:
            llm = cls(config=config, client=engine, checkpoint=checkpoint, tokenizer=tokenizer)
        except BaseException:
            engine.stop()
            raise
        llm._owned = engine
        weakref.finalize(llm, engine.stop)  # also when the program ends
        return llm

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | PoolingParams | None,
        request_id: str,
        *,
        lora_request: Any = None,
        priority: int = 0,
        trace_headers: Mapping[str, str] | None = None,
        kv_transfer: dict[str, Any] | None = None,
        owner: str = "",
        **unused: Any,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams the outputs of one request, as its `output_kind` says, until one is `finished`.

        Cancelling the task or closing the generator aborts the request. Raises `InvalidRequest` for a request that
        cannot be served, `EngineDeadError` when there is no engine and none will be started; when the engine dies, the
        stream goes on with the next one, or ends with finish_reason "error" when there is none. `trace_headers` change
        nothing: the server's sinks take them from HTTP requests. With scheduling_policy "fair" each `owner` gets an
        equal share.
        """
        del trace_headers
        refuse_unserved(self.generate, lora_request=lora_request, **unused)
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        if self._stopped:
            raise EngineDeadError("the engine was shut down")
        self._streams.start()
        parsed = parse_prompt(prompt)
        if parsed.token_ids is None:
            parsed = await self._off_loop(len(parsed.text or ""), self.front.tokenize, parsed, params)
        requests = self.front.submit(
            request_id, parsed, params, priority=priority, kv_transfer=kv_transfer, owner=owner
        )
        collector = self._streams.open(request_id, params.output_kind == RequestOutputKind.DELTA)
        finished = False
        try:
            for request in requests:
                await self._client.add(request)
            while not finished:
                output = await collector.get()
                finished = output.finished
                yield output
        finally:
            await self._streams.leave(request_id, finished)

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their streams end with finish_reason "abort". Unknown ids are ignored."""
        await self._streams.end([request_id] if isinstance(request_id, str) else request_id)

    @property
    def num_replayed(self) -> int:
        """Requests that were continued on another engine."""
        return self._streams.num_replayed

    @property
    def tokenizer(self) -> Tokenizer:
        """The front's tokenizer; raises `TokenizerError` when there is none."""
        return self.front.tokenizer()

    def encode(
        self, prompt: Any, pooling_params: PoolingParams | None, request_id: str, **options: Any
    ) -> AsyncGenerator[PoolingRequestOutput[PoolingOutput], None]:
        """Pools one prompt: yields one output, whose `outputs.error` holds the cause when pooling failed.

        `options` are keywords of `generate`.
        """
        stream: AsyncGenerator[Any, None] = self.generate(
            prompt, pooling_params or PoolingParams(), request_id, **options
        )
        return stream

    async def pair(self, first: str, second: str, params: PoolingParams) -> ParsedPrompt:
        """Joins two texts into one prompt for a reranker."""
        return await self._off_loop(len(first) + len(second), self.front.pair, first, second, params)

    async def tokenize(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; raises `InvalidRequest` without a tokenizer and for a text that is far too long."""
        return await self._off_loop(len(text), self.front.encode, text, add_special_tokens)

    async def render_chat(self, messages: list[Any], options: ChatOptions) -> ParsedPrompt:
        """Renders a conversation as a prompt; raises `InvalidRequest` naming what the template does not accept."""
        return await self._off_loop(text_size(messages), self.front.render_chat, messages, options)

    async def get_tokenizer(self) -> Any:
        """The transformers tokenizer."""
        return self.front.tokenizer().hf

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters of requests that bring none: those of the model's generation config."""
        return self.front.default_sampling_params.clone()

    async def check_health(self) -> None:
        """Raises `EngineDeadError` when requests cannot be served."""
        if self.errored:
            raise self.dead_error

    @property
    def is_running(self) -> bool:
        return not self._stopped and self._client.error is None

    @property
    def is_stopped(self) -> bool:
        return not self.is_running

    @property
    def errored(self) -> bool:
        return self._client.error is not None

    @property
    def dead_error(self) -> EngineDeadError:
        """The error that a new request would get at this moment."""
        return EngineDeadError(self._client.error or "the engine is running")

    async def stats(self) -> EngineStats:
        """The present values of the engine's own counters and gauges."""
        return await self._client.stats()

    async def do_log_stats(self) -> None:
        """Logs one line of statistics."""
        stats = await self._client.stats()
        logger.info("running %d, waiting %d, KV cache %.1f%% used", stats.running, stats.waiting, 100 * stats.kv_usage)

    async def is_tracing_enabled(self) -> bool:
        """Whether requests are traced, which a server with `--metrics-sinks otel` does."""
        return self._owned is None and "otel" in self.config.observability.metrics_sinks

    @property
    def model_config(self) -> ModelConfig:
        """The model's configuration as given, with the length and the dtype that the engine chose."""
        info = self._client.info
        return self.config.model.model_copy(update={"max_model_len": info.max_model_len, "dtype": info.dtype})

    async def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks of a pooling model with its default first; "generate" for any other."""
        pooling = self._client.info.pooling
        return ("generate",) if pooling is None else tuple(pooling.tasks)

    async def pause_generation(
        self, *, mode: str = "abort", wait_for_inflight_requests: bool = False, clear_cache: bool = True
    ) -> None:
        """Holds requests back until `resume_generation`; new ones wait.

        "abort" ends those that run, "wait" returns when they have ended, "keep" freezes them. `clear_cache` empties the
        prefix cache. `wait_for_inflight_requests` is an old name for "wait". Raises `RuntimeError` when the arguments
        contradict each other.
        """
        arguments = {"mode": "wait" if wait_for_inflight_requests else mode, "clear_cache": clear_cache}
        while await self._client.call("pause", arguments) and arguments["mode"] == "wait":
            await asyncio.sleep(_POLL_SECONDS)

    async def resume_generation(self) -> None:
        """Ends a pause."""
        await self._client.call("resume")

    async def is_paused(self) -> bool:
        """Whether `pause_generation` holds requests back."""
        return bool(await self._client.call("is_paused"))

    async def is_sleeping(self) -> bool:
        """Whether `sleep` has freed device memory that `wake_up` has not allocated again."""
        return bool(await self._client.call("is_sleeping"))

    async def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empties the prefix cache; False where running requests hold blocks and are not to be recomputed."""
        arguments = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
        return bool(await self._client.call("reset_prefix_cache", arguments))

    async def reset_mm_cache(self) -> None:
        """Does nothing: models take text only, so no media is kept."""

    async def collective_rpc(
        self, method: str, timeout: float | None = None, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> list[Any]:
        """Calls a method of every worker by name, with keyword arguments; returns the answers by rank.

        Raises `TimeoutError` when no answer came within `timeout` seconds; the workers continue the call.
        """
        if not isinstance(method, str) or args:
            raise ValueError("workers of another process take a method by name and keyword arguments only")
        call = self._client.call("worker", {"method": method, **(kwargs or {})})
        return list(await asyncio.wait_for(call, timeout))

    async def start_profile(self) -> None:
        """Begins a profiler trace (profile_dir)."""
        await self._client.call("start_profile")

    async def stop_profile(self) -> Any:
        """Ends the trace."""
        return await self._client.call("stop_profile")

    async def sleep(self, level: int = 1) -> None:
        """Frees device memory; raises where the platform cannot, and `ValueError` for an unknown level."""
        await self._client.call("sleep", {"keep": sleep_keeps(level)})

    async def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates the device memory again."""
        await self._client.call("wake_up", {"tags": tags or ["weights", "kv_cache"]})

    def shutdown(self) -> None:
        """Ends every stream and the engine process; returns when no process is left. May be called twice."""
        self._stopped = True
        self._streams.close()
        if self._owned is not None:
            self._owned.stop()

    async def _off_loop(self, num_chars: int, work: Callable[..., T], *args: Any) -> T:
        """Runs text work without delaying streams.

        On a thread for long texts, one short text per turn of the event loop.
        """
        if num_chars >= _LONG_TEXT:
            return await asyncio.to_thread(work, *args)
        async with self._short_texts:
            await asyncio.sleep(0)
            return work(*args)


AsyncLLMEngine = AsyncLLM


def _refuse_callables(params: SamplingParams) -> None:
    if params.logits_processors:
        raise InvalidRequest(
            "logits_processors are callables and stay in one process: load a logits processor plugin, or use LLM",
            "logits_processors",
        )
