"""`FrameConfig`: everything that a user can set, as one frozen tree.

Its fields are the command-line flags (kebab case), the YAML keys, the keyword arguments of `LLM` and `EngineArgs`, and
the tables in the docs, so each has a help text, a unit where it needs one, and bounds. No two settings have one name.
What follows from settings is kept by the objects that derive it. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, field_serializer, model_validator
from pydantic_core import PydanticSerializationError

from .errors import ConfigError
from .section import Section
from .server import ServerConfig


class ModelConfig(Section):
    """The model, and how requests become its tokens and its tokens become text."""

    model: str = Field(
        "",
        description="Folder of a Hugging Face checkpoint, or the name of a model (org/model), which a model source "
        "fetches; without one, or demo: the demo model that ships with frame.",
    )
    model_plugin: str | None = Field(
        None,
        description="Model plugin (PACKAGE:NAME) that serves the checkpoint, whatever its config.json says; "
        "default: the "
        "plugin of that name as its architecture, frame's own before those of other packages.",
    )
    revision: str | None = Field(
        None,
        description="Branch, tag or commit of a model that is named; of a folder: a subfolder, or a name under "
        "`snapshots/`.",
    )
    tokenizer: str | None = Field(
        None, description="Folder of the tokenizer, or the name of a model that has it; default: the model's."
    )
    skip_tokenizer_init: bool = Field(False, description="Load no tokenizer: prompts and outputs are token ids.")
    served_model_name: list[str] = Field(
        default_factory=list, description="Names by which requests may ask for the model; answers hold the first."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of weights and activations; auto: the checkpoint's, or one that suits the platform."
    )
    max_model_len: int | None = Field(
        None,
        ge=-1,
        description="Most tokens of prompt and output together; default: as many as the model was made for; -1: "
        "as fit in memory.",
    )
    hf_overrides: Mapping[str, Any] = Field(
        default_factory=dict, description="Values that replace those of the checkpoint's config.json, nested ones too."
    )
    generation_config: str = Field(
        "auto", description="Source of default sampling values: auto (the checkpoint), frame (none) or a folder."
    )
    override_generation_config: Mapping[str, Any] = Field(
        default_factory=dict, description="Values that replace those of the generation config."
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        "auto",
        description="Whether the engine generates text or pools (embeds, classifies); auto: as the checkpoint says.",
    )
    convert: Literal["auto", "none", "embed", "classify", "reward"] = Field(
        "auto", description="What a pooling engine uses the model for; auto: as its architecture says."
    )
    max_logprobs: int = Field(
        20,
        ge=-1,
        description="Most log-probabilities of a token that a request may ask for; -1: as many as the "
        "vocabulary has tokens.",
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = Field(
        "raw_logprobs",
        description="What log-probabilities are: of logits before or after processors and penalties; "
        "normalised, or the logits.",
    )
    logits_processors: list[Any] = Field(
        default_factory=list,
        description="Logits processors to load: plugin names, dotted paths, or classes (Python only).",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto",
        description="Form of message content for chat templates: joined text (string), parts (openai), or as "
        "sent (auto).",
    )
    chat_template: str | None = Field(
        None, description="Chat template: a file or the template itself; default: the checkpoint's."
    )
    seed: int = Field(0, description="Seed of requests that give none.")
    deterministic: bool = Field(
        False, description="Give every request the same bits, whatever other requests are in its batch."
    )

    @field_serializer("logits_processors", when_used="json")
    def _name_classes(self, processors: list[Any]) -> list[str]:
        """Replaces classes by their names; refuses one that another process could not import."""
        names = []
        for processor in processors:
            name = processor if isinstance(processor, str) else f"{processor.__module__}:{processor.__qualname__}"
            if name.startswith("__main__:") or "<locals>" in name:
                raise ValueError(f"logits processor {name} cannot be imported by another process; put it in a module")
            names.append(name)
        return names


class PoolerConfig(Section):
    """How pooling models make vectors; a setting that is not given follows the checkpoint."""

    pooling_type: str = Field("auto", description="Pooler plugin: cls, last, mean, all or step.")
    normalize: bool | None = Field(None, description="Scale embeddings to length 1.")
    dimensions: int | None = Field(
        None, ge=1, description="Length of embeddings, for Matryoshka models: the first numbers are kept."
    )
    use_activation: bool | None = Field(None, description="Turn the scores of classes into probabilities.")
    pooler_logit_bias: float | None = Field(
        None, description="Number that is subtracted from the scores of classes before they become probabilities."
    )
    step_tag_id: int | None = Field(None, ge=0, description="Token at whose positions the step pooler takes scores.")
    returned_token_ids: list[int] | None = Field(
        None, description="Indices of the scores to return, for reward models that score the vocabulary."
    )
    enable_chunked_processing: bool = Field(
        False,
        description="Embed a text that is longer than max_model_len in parts, and average their embeddings by length.",
    )
    max_embed_len: int | None = Field(
        None,
        ge=1,
        description="Most tokens of a text that is embedded in parts; default: as many as a request may have.",
    )


class CacheConfig(Section):
    """The KV cache."""

    block_size: int = Field(
        0, ge=0, le=256, description="Tokens in a block; 0 or auto: 16, or as many as the attention backend needs."
    )
    gpu_memory_utilization: float = Field(
        0.9,
        gt=0,
        le=1,
        description="Share of the device's memory that this engine may take, weights and KV cache together.",
    )
    kv_cache_memory_bytes: int | None = Field(
        None, ge=1, description="Bytes of KV cache; overrides gpu_memory_utilization."
    )
    num_gpu_blocks_override: int | None = Field(
        None, ge=2, description="Blocks of KV cache; overrides gpu_memory_utilization and kv_cache_memory_bytes."
    )
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto",
        description="Type of cached keys and values; auto: the model's; fp8 types hold twice as many tokens as "
        "16-bit ones.",
    )
    enable_prefix_caching: bool = Field(
        True, description="Reuse the KV blocks of prompts that begin with the same tokens."
    )
    prefix_caching_hash_algo: Literal["sha256", "xxhash"] = Field(
        "sha256",
        description="Hash by which blocks are found; xxhash needs the package of that name, and is for callers "
        "that are all trusted.",
    )


class SchedulerConfig(Section):
    """Which requests and tokens go into a step."""

    max_num_batched_tokens: int = Field(
        0, ge=0, description="Most tokens in a step; 0: as many as the platform suggests."
    )
    max_num_seqs: int = Field(
        0, ge=0, le=65535, description="Most requests that run at once; 0: as many as the platform suggests."
    )
    enable_chunked_prefill: bool = Field(True, description="Compute a long prompt in several steps.")
    max_num_partial_prefills: int = Field(
        1, ge=1, description="Most prompts that are partly computed at the same time."
    )
    max_long_partial_prefills: int = Field(
        1,
        ge=1,
        description="Most long prompts that are partly computed at the same time; fewer let short prompts overtake.",
    )
    long_prefill_token_threshold: int = Field(
        0,
        ge=0,
        description="Tokens above which a prompt is long, and most tokens of one prompt in a step; 0: no limit.",
    )
    scheduling_policy: str = Field(
        "fcfs", description="Scheduling policy plugin, which orders requests; with API keys the default is fair."
    )
    async_scheduling: bool = Field(
        True, description="Plan the next step before the tokens of the running one have reached the host."
    )
    stream_interval: int = Field(1, ge=1, description="Tokens in each piece of a streamed output.")
    max_queue: int = Field(
        4096,
        ge=1,
        description="Most requests that wait for the engine; more are refused, but of keys with a small share.",
    )

    @model_validator(mode="after")
    def _check_partial_prefills(self) -> Self:
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ValueError(
                f"max_long_partial_prefills {self.max_long_partial_prefills} is above "
                f"max_num_partial_prefills {self.max_num_partial_prefills}"
            )
        return self


class ExecutorConfig(Section):
    """The device, and the workers that compute on it."""

    platform: str = Field("auto", description="Platform plugin; auto: the preferred one whose device is here.")
    executor: str = Field("inline", description="Executor plugin: inline (this process) or process.")
    tensor_parallel_size: int = Field(1, ge=1, description="Devices that share each layer.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Devices that share the layers in stages.")
    enforce_eager: bool = Field(False, description="Capture no CUDA graphs: launch every step kernel by kernel.")
    num_threads: int | None = Field(
        None,
        ge=1,
        description="CPU threads that a worker computes with; default: one for each processor that it may use.",
    )


class AttentionConfig(Section):
    """How attention is computed."""

    attention_backend: str = Field(
        "auto", description="Attention backend plugin; auto: the preferred one that supports the layers."
    )
    shared_prefix_min_tokens: int | None = Field(
        None,
        ge=0,
        description="Where running requests share a prefix, a decode step reads its keys and values once for "
        "many of them if "
        "that saves reading at least so many tokens. 0: never. Default: where it is faster by the backend's costs.",
    )


class SpeculationConfig(Section):
    """Drafts: several guessed tokens that one step of the model checks; outputs stay the same."""

    speculator: str | None = Field(None, description="Speculator plugin, which drafts tokens; default: none.")
    num_speculative_tokens: int = Field(5, ge=1, le=64, description="Most draft tokens of a request in a step.")
    disable_by_batch_size: int | None = Field(
        None, ge=1, description="Draft no tokens while more requests than this run; default: no limit."
    )


class LoadConfig(Section):
    """Fetching models and reading weights."""

    model_source: str = Field(
        "auto", description="Model source plugin that fetches models by name; auto takes one that knows such names."
    )
    load_format: str = Field(
        "auto",
        description="Weight loader plugin; auto: the preferred one that supports the folder; dummy makes random "
        "weights.",
    )
    download_dir: str | None = Field(
        None, description="Folder for fetched models; default: the model source's own (hub: Hugging Face's cache)."
    )
    offline: bool = Field(False, description="Fetch no files of models; use those that were fetched before.")


class TransferConfig(Section):
    """Moving KV blocks between this engine and disks, host memory or other engines."""

    kv_connector: str | None = Field(None, description="KV connector plugin; default: none.")
    kv_role: Literal["both", "producer", "consumer"] = Field(
        "both", description="Whether this engine saves KV blocks (producer), loads them (consumer), or both."
    )
    kv_load_failure_policy: Literal["recompute", "fail"] = Field(
        "recompute",
        description="Whether a request whose KV blocks could not be loaded computes them (recompute) or ends "
        "with an error (fail).",
    )


class StructuredOutputsConfig(Section):
    """JSON schemas, regular expressions and grammars that outputs must obey."""

    structured_outputs_backend: str = Field("auto", description="Grammar backend plugin.")
    disable_any_whitespace: bool = Field(
        False, description="Let JSON have no white space between its parts, unless a request allows it."
    )
    any_whitespace: bool = Field(
        False,
        description="Let JSON have up to 64 characters of any white space between its parts; else only a space "
        "after , and :.",
    )
    disable_additional_properties: bool = Field(
        False, description="Let JSON objects have no properties that their schema does not name, unless it allows them."
    )
    max_grammar_length: int = Field(
        1 << 18, ge=1, description="Most characters of a schema, grammar, regular expression or list of choices."
    )
    grammar_compile_seconds: float = Field(
        5.0, gt=0, le=3600, description="Seconds that a grammar may take to compile before it is refused."
    )
    grammar_compile_bytes: int = Field(
        1 << 30, ge=1, description="Bytes of memory that a grammar may take to compile before it is refused."
    )
    grammar_cache_bytes: int = Field(
        256 << 20, ge=0, description="Bytes of compiled grammars that are kept for later requests."
    )


class ObservabilityConfig(Section):
    """Statistics, metrics and profiles."""

    disable_log_stats: bool = Field(True, description="Keep no statistics, so that `LLM.get_metrics` has none.")
    metrics_sinks: list[str] = Field(
        default_factory=list,
        description="Metrics sink plugins, which get a report of every finished request, such as log and otel.",
    )
    vllm_metrics: bool = Field(False, description="Expose metrics under vLLM's names (`vllm:…`) as well.")
    profile_dir: str | None = Field(None, description="Folder for profiler traces, an absolute path.")

    @model_validator(mode="after")
    def _check_profile_dir(self) -> Self:
        if self.profile_dir is not None and not self.profile_dir.startswith("/"):
            raise ValueError(f"profile_dir must be an absolute path, got {self.profile_dir!r}")
        return self


class FrameConfig(Section):
    """The whole configuration. `plugin` maps a plugin's name to its own settings."""

    model: ModelConfig = ModelConfig()
    pooler: PoolerConfig = PoolerConfig()
    cache: CacheConfig = CacheConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    executor: ExecutorConfig = ExecutorConfig()
    attention: AttentionConfig = AttentionConfig()
    speculation: SpeculationConfig = SpeculationConfig()
    load: LoadConfig = LoadConfig()
    transfer: TransferConfig = TransferConfig()
    structured_outputs: StructuredOutputsConfig = StructuredOutputsConfig()
    server: ServerConfig = ServerConfig()
    observability: ObservabilityConfig = ObservabilityConfig()
    plugin: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict, description="Settings of plugins by name.")

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
