"""`LLMEngine`: requests in, one step at a time, outputs out; in the caller's process and thread."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.front.front import Front
from frame.core.front.prompts import InvalidRequest
from frame.core.front.tokenizer import TokenizerSource
from frame.core.interfaces.adapters import AdapterSource
from frame.core.interfaces.engine import EngineStats
from frame.core.interfaces.pooling_params import PoolingParams
from frame.core.interfaces.sampling import SamplingParams

from .lora import KnownAdapters, LoRARequest, load_now
from .metrics import Metric, RequestStatistics
from .torch_import import LATE, import_torch, spins_long
from .transfer_args import take_transfer
from .unserved import refuse_unserved, sleep_keeps

if TYPE_CHECKING:
    from frame.core.engine.engine import Engine
    from frame.vllm_names.engine_args import EngineArgs

logger = logging.getLogger(__name__)


class LLMEngine:
    """An engine and its front, driven by the caller: `add_request`, then `step` until nothing is unfinished."""

    def __init__(self, config: FrameConfig, core: Engine, front: Front) -> None:
        self.config = config
        self.core = core
        self.front = front
        self.adapters = KnownAdapters()
        self._statistics: RequestStatistics | None = None
        if not config.observability.disable_log_stats:
            self._statistics = RequestStatistics()
            front.on_finished = self._statistics.observe

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> LLMEngine:
        """Starts an engine; raises one error with the root cause."""
        return cls.from_config(engine_args.create_engine_config())

    @classmethod
    def from_config(cls, config: FrameConfig) -> LLMEngine:
        """Like `from_engine_args`, but takes a configuration tree."""
        if len(config.data_parallel.served_ranks) > 1 or config.data_parallel.headless:
            raise ConfigError(
                f"data_parallel_size {config.data_parallel.data_parallel_size}: LLM has one engine; use AsyncLLM or "
                "`frame serve`, or a program for each engine with LLM(..., data_parallel_rank=...)"
            )
        from frame.core.plugin_host.model_sources import fetch_model
        from frame.core.plugin_host.registry import Registry
        from frame.core.startup.early import begin_platforms
        from frame.links.early_workers import begin_workers

        config = fetch_model(config)
        registry = Registry.load()
        with begin_workers(config, registry) as begun:
            begin_platforms(config, registry)
            import_torch()
            from frame.core.config.checkpoint import read_checkpoint
            from frame.core.plugin_host.logits_processors import request_check
            from frame.offline.in_process import make_engine

            checkpoint = read_checkpoint(config)
            check = request_check(config, registry)
            tokenizer = TokenizerSource(config, checkpoint, registry)
            core = make_engine(config, registry, vocabulary=tokenizer.vocabulary, begun=begun)
        if core.info.platform == "cpu" and core.executor.is_local and spins_long():
            logger.warning(LATE)
        try:
            return cls(config, core, Front(config, checkpoint, core.info, tokenizer=tokenizer, validators=[check]))
        except BaseException:
            core.close()
            raise

    def add_request(
        self,
        request_id: str,
        prompt: Any,
        params: SamplingParams | PoolingParams,
        arrival_time: float | None = None,
        lora_request: Any = None,
        *,
        priority: int = 0,
        **unused: Any,
    ) -> str:
        """Queues a request and returns its id.

        Raises `InvalidRequest` (a `ValueError`), and then nothing is left of it. `lora_request` is a `LoRARequest`,
        whose adapter is read first unless the engine has it. `extra_args["kv_transfer_params"]` of `params` is for the
        KV connector. `arrival_time` and None-valued keywords of vLLM are accepted and change nothing.
        """
        del arrival_time
        refuse_unserved(self.add_request, **unused)
        params, transfer = take_transfer(params)
        adapter = None if lora_request is None else self._loaded(lora_request)
        requests = self.front.submit(
            request_id, prompt, params, priority=priority, kv_transfer=transfer, adapter=adapter
        )
        try:
            for request in requests:
                self.core.add(request)
        except BaseException as error:
            self.abort_request([request_id])
            if isinstance(error, ValueError):
                raise InvalidRequest(str(error)) from error
            raise
        return request_id

    def _loaded(self, given: Any) -> AdapterSource:
        source = self.adapters.source(given)
        load_now(self.core.call, source, given.replaced)
        return source

    def add_lora(self, lora_request: LoRARequest) -> bool:
        """Reads an adapter now; raises `InvalidRequest` for one that does not fit."""
        self._loaded(lora_request)
        return True

    def remove_lora(self, lora_id: int) -> bool:
        """Unloads an adapter; requests that have it finish. False for an unknown number."""
        name = self.adapters.forget(lora_id)
        if name is not None:
            self.core.call("unload_adapter", {"name": name})
        return name is not None

    def pin_lora(self, lora_id: int) -> bool:
        """Keeps an adapter in host memory. False for an unknown number."""
        name = self.adapters.name_of(lora_id)
        if name is not None:
            self.core.call("pin_adapter", {"name": name})
        return name is not None

    def list_loras(self) -> set[int]:
        """The numbers of the adapters that can be used."""
        return self.adapters.numbers()

    def step(self) -> list[Any]:
        """Runs one step of the engine.

        Returns the outputs of requests that changed: `RequestOutput`, or `PoolingRequestOutput` of a pooling model.
        """
        outputs, ended = self.front.process(self.core.step())
        if ended:
            self.core.abort(ended)
        return outputs

    def abort_request(self, request_ids: str | Iterable[str]) -> None:
        """Ends requests without a further output; unknown ids are ignored."""
        _, ended = self.front.abort([request_ids] if isinstance(request_ids, str) else request_ids)
        if ended:
            self.core.abort(ended)

    def has_unfinished_requests(self) -> bool:
        return self.front.num_unfinished > 0

    def get_num_unfinished_requests(self) -> int:
        return self.front.num_unfinished

    def get_tokenizer(self) -> Any:
        """The tokenizer of the library that reads it, which is transformers unless `tokenizer_mode` names another.

        Raises `TokenizerError` when there is none.
        """
        return self.front.source.get().native

    def stats(self) -> EngineStats:
        """The engine's own counters and gauges now."""
        return self.core.stats()

    def get_metrics(self) -> list[Metric]:
        """Every metric now; raises `RuntimeError` unless statistics are kept (disable_log_stats=False)."""
        if self._statistics is None:
            raise RuntimeError("metrics are not kept: pass disable_log_stats=False")
        return self._statistics.snapshot(self.core.stats())

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """Empties the prefix cache; running requests are recomputed if asked, else their blocks make this False."""
        arguments = {"reset_running_requests": reset_running_requests, "reset_connector": reset_connector}
        return bool(self.core.call("reset_prefix_cache", arguments))

    def reset_mm_cache(self) -> None:
        """Does nothing: models take text only, so no media is kept."""

    def collective_rpc(
        self,
        method: str | Callable[..., Any],
        timeout: float | None = None,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> list[Any]:
        """Calls `method` on every worker: by name, or `method(worker, *args, **kwargs)` where workers live here.

        Returns the answers by rank. Raises `TimeoutError` when there is none after `timeout` seconds; a worker of this
        thread (executor 'inline') takes no timeout, which is a `ValueError`.
        """
        keywords = dict(kwargs or {})
        limit: dict[str, Any] = {} if timeout is None else {"timeout": timeout}
        if isinstance(method, str) and not args:
            return list(self.core.call("worker", {"method": method, **keywords}, **limit))
        if not self.core.executor.is_local:
            raise ValueError(
                "workers of other processes take a method by name and keyword arguments only; use executor 'inline' "
                "for callables and positional arguments"
            )
        name = method

        def function(worker: Any, *given: Any) -> Any:
            if isinstance(name, str):
                if (target := worker.methods.get(name)) is None:
                    raise ValueError(f"no worker method {name!r}; there are: {', '.join(sorted(worker.methods))}")
                return target(*given, **keywords)
            return name(worker, *given, **keywords)

        return list(self.core.call("worker", {"method": "run", "function": function, "args": tuple(args)}, **limit))

    def apply_model(self, func: Callable[[Any], Any]) -> list[Any]:
        """Calls `func(model)` in every worker; returns the answers by rank."""
        return self.collective_rpc(lambda worker: func(worker.model))

    def start_profile(self) -> None:
        """Begins a profiler trace (profile_dir)."""
        self.core.call("start_profile")

    def stop_profile(self) -> Any:
        """Ends the trace."""
        return self.core.call("stop_profile")

    def sleep(self, level: int = 1) -> None:
        """Frees device memory: level 1 keeps the weights on the host, level 2 keeps nothing.

        Raises `NotImplementedError` where the platform cannot.
        """
        keep = sleep_keeps(level)
        if self.front.num_unfinished:
            raise RuntimeError(
                f"{self.front.num_unfinished} requests are unfinished; finish or abort them before sleep"
            )
        self.core.call("sleep", {"keep": keep})

    def wake_up(self, tags: list[str] | None = None) -> None:
        """Allocates the device memory again, for the given tags or all: "weights", "kv_cache"."""
        self.core.call("wake_up", {"tags": list(tags or ("weights", "kv_cache"))})

    def close(self) -> None:
        """Frees the device and stops workers. May be called twice."""
        self.core.close()
