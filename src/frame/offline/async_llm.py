"""`AsyncLLM`: streaming inference for asyncio programs, under vLLM's names, over an engine in another process."""

from __future__ import annotations

import asyncio
import logging
import weakref
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping
from contextlib import aclosing
from functools import partial
from typing import TYPE_CHECKING, Any

from frame.core.config.checkpoint import Checkpoint, read_checkpoint
from frame.core.config.errors import ConfigError
from frame.core.config.model import ModelConfig
from frame.core.config.tree import FrameConfig
from frame.core.front.async_front import AsyncFront
from frame.core.front.outputs import PoolingOutput, PoolingRequestOutput, RequestOutput
from frame.core.front.prompts import InvalidRequest
from frame.core.front.tokenizer import TokenizerSource
from frame.core.interfaces.adapters import AdapterSource
from frame.core.interfaces.client import EngineClient, EngineDeadError
from frame.core.interfaces.engine import EngineStats
from frame.core.interfaces.pooling_params import PoolingParams
from frame.core.interfaces.sampling import SamplingParams
from frame.core.interfaces.tokenizer import Tokenizer
from frame.core.plugin_host.model_sources import fetch_model
from frame.core.plugin_host.registry import Registry
from frame.elastic.sizes import refusal
from frame.quoting import quoted

from .background_engine import BackgroundEngine
from .lora import POLL_SECONDS, KnownAdapters, LoRARequest
from .streaming_input import Sessions
from .transfer_args import take_transfer
from .unserved import refuse_unserved, sleep_keeps

if TYPE_CHECKING:
    from frame.vllm_names.engine_args import AsyncEngineArgs

logger = logging.getLogger(__name__)

#: seconds between two checks whether the running requests of a paused engine have ended
_POLL_SECONDS = 0.02


class AsyncLLM(AsyncFront):
    """An `AsyncFront` with vLLM's methods. `client` belongs to the caller unless `from_engine_args` made it."""

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
            wrong = ", ".join([*(f"{quoted(one)}" for one in given), *map(repr, unknown)])
            raise ConfigError(
                "AsyncLLM takes the config and the client of a running engine, and checkpoint, registry and tokenizer, "
                f"but not {wrong or 'nothing'}; AsyncLLM.from_engine_args(AsyncEngineArgs(model=...)) starts an engine"
            )
        super().__init__(config, client, checkpoint or read_checkpoint(config), registry or Registry.load(), tokenizer)
        self.config = config
        self.adapters = KnownAdapters()
        self._sessions = Sessions(client)
        self._owned: BackgroundEngine | None = None

    @classmethod
    def from_engine_args(cls, engine_args: AsyncEngineArgs) -> AsyncLLM:
        """Starts an engine process and waits until it is ready; raises one error with the root cause."""
        return cls.from_config(engine_args.create_engine_config())

    @classmethod
    def from_config(cls, config: FrameConfig) -> AsyncLLM:
        """Like `from_engine_args`, but takes a configuration tree."""
        config = fetch_model(config)
        checkpoint = read_checkpoint(config)
        registry = Registry.load()
        tokenizer = TokenizerSource(config, checkpoint, registry)
        tokenizer.preload()
        engine = BackgroundEngine(config)
        try:
            llm = cls(config=config, client=engine, checkpoint=checkpoint, registry=registry, tokenizer=tokenizer)
        except BaseException:
            engine.stop()
            raise
        llm._owned = engine
        weakref.finalize(llm, engine.stop)  # also when the program ends
        return llm

    def generate(
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
        """Streams the outputs of one request as `AsyncFront.stream` does.

        `prompt` may be an async iterable of prompts, plain or as `StreamingInput`: then the request's prompt grows by
        each while it runs, and each is answered before the next is. `kv_transfer` is for the KV connector; it may also
        be `extra_args["kv_transfer_params"]` of the parameters. `trace_headers` change nothing: the server's sinks take
        them from HTTP requests.
        """
        del trace_headers
        refuse_unserved(self.generate, **unused)
        params = sampling_params if sampling_params is not None else self.get_default_sampling_params()
        params, kv_transfer = take_transfer(params, kv_transfer)
        options: dict[str, Any] = {"priority": priority, "kv_transfer": kv_transfer, "owner": owner}
        self._sessions.check_unused(request_id)
        stream: Callable[..., AsyncGenerator[RequestOutput, None]] = self.stream
        if isinstance(prompt, AsyncIterable):
            self._sessions.check_unused(request_id, self._collectors)
            stream = partial(self._sessions.stream, self)
        if lora_request is None:
            return stream(prompt, params, request_id, **options)
        return self._adapted(
            lora_request, lambda adapter: stream(prompt, params, request_id, adapter=adapter, **options)
        )

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Ends requests; their streams end with finish_reason "abort". Unknown ids are ignored."""
        names = [request_id] if isinstance(request_id, str) else list(request_id)
        await super().abort(self._sessions.end(names))

    async def _adapted(
        self, given: Any, stream: Callable[[AdapterSource], AsyncGenerator[RequestOutput, None]]
    ) -> AsyncGenerator[RequestOutput, None]:
        """Streams what `stream` gives for an adapter, which is read first unless the engine has it."""
        async with aclosing(stream(await self._loaded(given))) as outputs:
            async for output in outputs:
                yield output

    async def _loaded(self, given: Any) -> AdapterSource:
        source = self.adapters.source(given)
        arguments = {"name": source.name, "path": source.path, "replace": given.replaced}
        try:
            while not await self._client.call("load_adapter", arguments):
                await asyncio.sleep(POLL_SECONDS)
        except (ValueError, RuntimeError) as error:
            if isinstance(error, EngineDeadError):
                raise
            raise InvalidRequest(str(error), "lora_request") from None
        return source

    async def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter now; raises `InvalidRequest` for one that does not fit."""
        await self._loaded(lora_request)
        return True

    async def remove_lora(self, lora_id: int) -> bool:
        """Unloads an adapter; requests that have it finish. False for an unknown number."""
        name = self.adapters.forget(lora_id)
        if name is not None:
            await self._client.call("unload_adapter", {"name": name})
        return name is not None

    async def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter in host memory. False for an unknown number."""
        name = self.adapters.name_of(lora_id)
        if name is not None:
            await self._client.call("pin_adapter", {"name": name})
        return name is not None

    async def list_loras(self) -> set[int]:
        """The numbers of the adapters that can be used."""
        return self.adapters.numbers()

    @property
    def tokenizer(self) -> Tokenizer:
        """The front's tokenizer; raises `TokenizerError` when there is none."""
        return self.front.source.get()

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

    async def get_tokenizer(self) -> Any:
        """The tokenizer of the library that reads it, which is transformers unless `tokenizer_mode` names another."""
        return self.front.source.get().native

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling parameters that requests without any get, from the model's generation config."""
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
        async with asyncio.timeout(timeout):
            return list(await self._client.call("worker", {"method": method, **(kwargs or {})}))

    async def scale_elastic_ep(self, new_data_parallel_size: int, drain_timeout: float = 300) -> None:
        """Has so many engines share the experts from now on; returns when they serve.

        Running requests go on with them, so that none need end within `drain_timeout` seconds. Raises, before anything
        stops, `ValueError` for a number that is impossible and `RuntimeError` when it is no time for it; when the new
        engines do not start, `EngineDeadError` with the cause, and the old number serves on.
        """
        if isinstance(drain_timeout, bool) or not isinstance(drain_timeout, int | float) or not drain_timeout > 0:
            raise ValueError(f"drain_timeout must be a number of seconds above 0, got {quoted(drain_timeout)}")
        if reason := refusal(self.config, new_data_parallel_size):
            raise ValueError(reason)
        await self._client.call("scale_elastic_ep", {"new_data_parallel_size": new_data_parallel_size})

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
        self._sessions.end_all()
        super().shutdown()
        if self._owned is not None:
            self._owned.stop()


AsyncLLMEngine = AsyncLLM
