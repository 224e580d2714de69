"""`FrameConfig`: everything that a user can set, as one frozen tree.

Its fields are the command-line flags (kebab case), the YAML keys, the keyword arguments of `LLM` and `EngineArgs`, and
the tables in the docs, so each has a help text, a unit where it needs one, and bounds. No two settings have one name.
What follows from settings is kept by the objects that derive it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Literal

from pydantic_core import PydanticSerializationError

from frame.expert_balance.settings import ExpertBalanceConfig
from frame.kept_weights.settings import KeptWeightsConfig
from frame.kv_events.settings import KVEventsConfig
from frame.quoting import quoted
from frame.weight_offload.settings import WeightOffloadConfig

from .adapters import AdapterConfig
from .data_parallel import MOST_RANKS, DataParallelConfig
from .errors import ConfigError
from .model import ModelConfig, PoolerConfig
from .section import Section, setting
from .server import ServerConfig


class CacheConfig(Section):
    """The KV cache."""

    block_size: int = setting(
        0, "Tokens in a block; 0 or auto: 16, or as many as the attention backend needs.", ge=0, le=256
    )
    gpu_memory_utilization: float = setting(
        0.9, "Share of the device's memory that this engine may take, weights and KV cache together.", gt=0, le=1
    )
    kv_cache_memory_bytes: int | None = setting(None, "Bytes of KV cache; overrides gpu_memory_utilization.", ge=1)
    num_gpu_blocks_override: int | None = setting(
        None, "Blocks of KV cache; overrides gpu_memory_utilization and kv_cache_memory_bytes.", ge=2, le=2**31 - 1
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = setting(
        "auto", "Type of cached keys and values; auto: the model's; fp8 types hold twice as many tokens as 16-bit ones."
    )
    mamba_ssm_cache_dtype: Literal["auto", "float32", "float16", "bfloat16"] = setting(
        "auto", "Type of running states of recurrent layers; auto: float32. 16-bit ones are rounded in each step."
    )
    calculate_kv_scales: bool = setting(
        False,
        "Choose the scales of an 8-bit KV cache by the first tokens that are served, where a checkpoint has none.",
    )
    enable_prefix_caching: bool = setting(True, "Reuse the KV blocks of prompts that begin with the same tokens.")
    prefix_caching_hash_algo: Literal["sha256", "xxhash"] = setting(
        "sha256",
        "Hash by which blocks are found; xxhash needs the package of that name, and is for callers that are all "
        "trusted.",
    )


class SchedulerConfig(Section):
    """Which requests and tokens go into a step."""

    max_num_batched_tokens: int = setting(
        0, "Most tokens in a step; 0: as many as the platform suggests.", ge=0, le=1 << 24
    )
    max_num_seqs: int = setting(
        0, "Most requests that run at once; 0: as many as the platform suggests.", ge=0, le=65535
    )
    enable_chunked_prefill: bool = setting(True, "Compute a long prompt in several steps.")
    max_num_partial_prefills: int = setting(1, "Most prompts that are partly computed at the same time.", ge=1)
    max_long_partial_prefills: int = setting(
        1, "Most long prompts that are partly computed at the same time; fewer let short prompts overtake.", ge=1
    )
    long_prefill_token_threshold: int = setting(
        0, "Tokens above which a prompt is long, and most tokens of one prompt in a step; 0: no limit.", ge=0
    )
    scheduling_policy: str = setting(
        "fcfs", "Scheduling policy plugin, which orders waiting requests; with API keys the default is fair."
    )
    async_scheduling: bool = setting(
        True, "Plan the next step before the tokens of the running one have reached the host."
    )
    stream_interval: int = setting(1, "Tokens in each chunk of a streamed output.", ge=1)
    max_queue: int = setting(
        4096,
        "Most requests that wait for the engine; more are refused, except from API keys that have few waiting.",
        ge=1,
    )

    def contradictions(self) -> Iterator[str]:
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            long, every = self.max_long_partial_prefills, self.max_num_partial_prefills
            yield f"max_long_partial_prefills {long} is above max_num_partial_prefills {every}"


class ExecutorConfig(Section):
    """The device, and the workers that compute on it."""

    platform: str = setting("auto", "Platform plugin; auto: the preferred one whose device this machine has.")
    executor: str = setting(
        "auto",
        "Executor plugin: inline (the worker is in the engine's process), process (workers have their own processes), "
        "nodes (on several machines), ray (in a Ray cluster), external (under torchrun, see docs/many-devices.md); "
        "auto: inline for one worker, process for several, nodes where nnodes is above 1.",
    )
    tensor_parallel_size: int = setting(
        1, "Devices among which the weights of each layer are divided.", ge=1, le=MOST_RANKS
    )
    pipeline_parallel_size: int = setting(
        1, "Devices among which the layers are divided, one stage for each.", ge=1, le=MOST_RANKS
    )
    pipeline_layers: list[int] = setting(
        [], "Layers of each pipeline stage, as 20 22 22 16; default: as many in each, those left over not in the last."
    )
    decode_context_parallel_size: int = setting(
        1,
        "Devices, of those among which weights are divided, that share the KV cache of a request: of n devices each "
        "keeps every n-th token. Makes room for more tokens where a model has fewer key/value heads than devices.",
        ge=1,
        le=MOST_RANKS,
    )
    prefill_context_parallel_size: int = setting(
        1,
        "Devices with the same weights that divide the tokens of each step, as of a long prompt, and share the KV "
        "cache of a request: of n devices each keeps every n-th token.",
        ge=1,
        le=MOST_RANKS,
    )
    enable_expert_parallel: bool = setting(
        False, "Give each device whole experts of a mixture-of-experts model instead of a part of every expert."
    )
    expert_exchange: str = setting(
        "auto",
        "Expert exchange plugin, which moves tokens between data ranks that share experts; auto: the preferred one.",
    )
    nnodes: int = setting(
        1, "Machines over which the devices are spread, see docs/many-devices.md.", ge=1, le=MOST_RANKS
    )
    node_rank: int = setting(0, "Number of this machine among them; the server runs on number 0.", ge=0, le=MOST_RANKS)
    master_addr: str = setting("", "Address of machine 0 at which the others reach it.")
    master_port: int = setting(29500, "Port of machine 0 at which it waits for the others.", ge=1, le=65535)
    worker_extension: str | None = setting(
        None, "Worker extension plugin, whose methods collective_rpc then calls on every worker; default: none."
    )
    enforce_eager: bool = setting(False, "Capture no CUDA graphs: launch every step kernel by kernel.")
    num_threads: int | None = setting(
        None,
        "CPU threads that a worker computes with; default: one for each processor that it may use.",
        ge=1,
        le=MOST_RANKS,
    )

    worker_poll_seconds: float = setting(
        0.02,
        "Seconds for which a worker process looks for its next step without sleeping, after one that came as soon. 0: "
        "it sleeps at once, and between two looks at its device, for machines with few processors or a tight quota.",
        ge=0.0,
        le=1.0,
    )

    def contradictions(self) -> Iterator[str]:
        workers = self.tensor_parallel_size * self.pipeline_parallel_size * self.prefill_context_parallel_size
        if self.node_rank >= self.nnodes:
            yield f"node_rank {self.node_rank} is not below nnodes {self.nnodes}: nodes are numbered from 0"
        if self.nnodes > 1 and not self.master_addr:
            yield f"nnodes {self.nnodes} needs master_addr, at which the other nodes reach node 0"
        if workers % self.nnodes:
            yield (
                f"{workers} workers (tensor_parallel_size times pipeline_parallel_size times "
                f"prefill_context_parallel_size) cannot be spread evenly over nnodes {self.nnodes}"
            )


class AttentionConfig(Section):
    """How attention is computed."""

    attention_backend: str = setting(
        "auto", "Attention backend plugin; auto: the preferred one that supports the layers."
    )
    shared_prefix_min_tokens: int | None = setting(
        None,
        "Tokens whose reading must be saved before a decode step reads the keys and values of a prefix that running "
        "requests share once for many of them; 0: never; default: where the backend's cost model says that it is "
        "faster.",
        ge=0,
    )


class SpeculationConfig(Section):
    """Drafts: several guessed tokens that one step of the model checks; outputs stay the same."""

    speculator: str | None = setting(None, "Speculator plugin, which drafts tokens; default: none.")
    num_speculative_tokens: int = setting(5, "Most draft tokens of a request in a step.", ge=1, le=64)
    disable_by_batch_size: int | None = setting(
        None, "Draft no tokens while more requests than this run; default: no limit.", ge=1
    )


class LoadConfig(Section):
    """Fetching models and reading weights."""

    model_source: str = setting(
        "auto", "Model source plugin that fetches models by name; auto: the preferred one that knows such names."
    )
    load_format: str = setting(
        "auto", "Weight loader plugin; auto: the preferred one that supports the folder; dummy makes random weights."
    )
    safetensors_load_strategy: Literal["lazy", "eager", "prefetch"] = setting(
        "lazy",
        "How safetensors files are read: mapped, each part when it is needed (lazy); each file whole, for network "
        "disks (eager); mapped, while threads bring the files into the page cache (prefetch).",
    )
    use_tqdm_on_load: bool = setting(True, "Show a bar while weights load, where there is a terminal.")
    download_dir: str | None = setting(
        None, "Folder for fetched models; default: the model source's own (hub: Hugging Face's cache)."
    )
    offline: bool = setting(False, "Fetch no files of models; use those that were fetched before.")


class TransferConfig(Section):
    """Moving KV blocks between this engine and disks, host memory or other engines."""

    kv_connector: str | None = setting(None, "KV connector plugin; default: none.")
    kv_role: Literal["both", "producer", "consumer"] = setting(
        "both", "Whether this engine saves KV blocks (producer), loads them (consumer), or both."
    )
    kv_ip: str = setting("127.0.0.1", "This machine's address for engines that exchange KV blocks with this one.")
    kv_load_failure_policy: Literal["recompute", "fail"] = setting(
        "recompute",
        "Whether a request whose KV blocks could not be loaded computes them (recompute) or ends with an error (fail).",
    )


class StructuredOutputsConfig(Section):
    """JSON schemas, regular expressions and grammars that outputs must obey."""

    structured_outputs_backend: str = setting(
        "auto", "Grammar backend plugin; auto: the preferred one that can be used here."
    )
    disable_any_whitespace: bool = setting(
        False, "Let JSON have no white space between its parts, unless a request allows it."
    )
    any_whitespace: bool = setting(
        False,
        "Let JSON have up to 64 characters of any white space between its parts; else only a space after , and :.",
    )
    disable_additional_properties: bool = setting(
        False, "Let JSON objects have no properties that their schema does not name, unless it allows them."
    )
    max_grammar_length: int = setting(
        1 << 18, "Most characters of a schema, grammar, regular expression or list of choices.", ge=1
    )
    grammar_compile_seconds: float = setting(
        5.0, "Seconds that a grammar may take to compile before it is refused.", gt=0, le=3600
    )
    grammar_compile_bytes: int = setting(
        1 << 30, "Bytes of memory that a grammar may take to compile before it is refused.", ge=1
    )
    grammar_cache_bytes: int = setting(256 << 20, "Bytes of compiled grammars that are kept for later requests.", ge=0)


class ObservabilityConfig(Section):
    """Statistics, metrics and profiles."""

    disable_log_stats: bool = setting(True, "Keep no statistics, so that `LLM.get_metrics` has none.")
    metrics_sinks: list[str] = setting(
        [], "Metrics sink plugins, which get a report of every finished request, such as log and otel."
    )
    vllm_metrics: bool = setting(False, "Expose metrics under vLLM's names (`vllm:…`) as well.")
    profile_dir: str | None = setting(None, "Folder for profiler traces, an absolute path.")

    def contradictions(self) -> Iterator[str]:
        if self.profile_dir is not None and not self.profile_dir.startswith("/"):
            yield f"profile_dir must be an absolute path, got {quoted(self.profile_dir)}"


class FrameConfig(Section):
    """The whole configuration. `plugin` maps a plugin's name to its own settings."""

    model: ModelConfig = ModelConfig()
    pooler: PoolerConfig = PoolerConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    data_parallel: DataParallelConfig = DataParallelConfig()
    expert_balance: ExpertBalanceConfig = ExpertBalanceConfig()
    attention: AttentionConfig = AttentionConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    load: LoadConfig = LoadConfig()
    weight_offload: WeightOffloadConfig = WeightOffloadConfig()
    kept_weights: KeptWeightsConfig = KeptWeightsConfig()
    transfer: TransferConfig = TransferConfig()
    kv_events: KVEventsConfig = KVEventsConfig()
    adapters: AdapterConfig = AdapterConfig()
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()
    server: ServerConfig = ServerConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    plugin: Mapping[str, Mapping[str, Any]] = setting({}, "Settings of plugins by name.")

    def contradictions(self) -> Iterator[str]:
        parallel, executor = self.data_parallel, self.executor
        if parallel.headless and parallel.data_parallel_size == 1 and executor.node_rank == 0:
            yield (
                "headless is for a machine that starts some of the engines of a server elsewhere: set "
                "data_parallel_size, data_parallel_size_local, data_parallel_start_rank, data_parallel_address and "
                "data_parallel_secret_file"
            )
        if self.adapters.enable_lora and executor.prefill_context_parallel_size > 1:
            yield "enable_lora with prefill_context_parallel_size: devices that divide tokens serve no adapters"
        if self.expert_balance.enable_eplb:
            if not executor.enable_expert_parallel:
                yield "enable_eplb moves whole experts between devices, which needs enable_expert_parallel"
            if self.model.deterministic:
                yield "deterministic does not go with enable_eplb: sums depend on where experts lie"
        if parallel.over_machines:
            if executor.enable_expert_parallel and parallel.first_rank and not parallel.headless:
                first = parallel.first_rank
                yield f"data_parallel_start_rank {first}: a server whose engines share experts starts engine 0 itself"
            if executor.enable_expert_parallel and parallel.data_parallel_rpc_port == 65535:
                yield "workers of engines that share experts meet at the port after data_parallel_rpc_port 65535"
            if executor.nnodes > 1:
                yield f"nnodes {executor.nnodes}: each engine of data_parallel_address is on one machine so far"
        elif executor.nnodes > 1 and len(parallel.local_ranks) > 1:
            apart = "" if executor.enable_expert_parallel else ", or start a server for each with data_parallel_rank"
            yield (
                f"nnodes {executor.nnodes} with data_parallel_size {parallel.data_parallel_size}: an engine on several "
                f"machines is the only one of its server; give each one machine by data_parallel_address{apart}"
            )

    @classmethod
    def from_flat(cls, **values: Any) -> FrameConfig:
        """Makes the tree from settings by name, as `LLM(**values)` takes them; None means the default.

        Raises `ConfigError` for an unknown name, a wrong value, or settings that contradict each other.
        """
        from .flat import from_flat

        return from_flat(values)

    def to_plain(self) -> dict[str, Any]:
        """The settings as JSON values, for other processes; raises `ConfigError` for a class that only lives here."""
        try:
            return self.model_dump(mode="json")
        except PydanticSerializationError as error:
            reason = str(error).removeprefix("Error serializing to JSON: ").rpartition("ValueError: ")[2]
            raise ConfigError(f"the configuration cannot be given to another process: {reason}") from None
