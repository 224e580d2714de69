"""`FrameConfig`: everything a user can set, as one frozen tree.

Its fields are the command-line flags (kebab case), the YAML keys, the keyword arguments of `LLM` and `EngineArgs`, and
the tables in the docs, so each has a help text, a unit where it needs one, and bounds. A leaf's name is unique in the
whole tree. Facts that follow from these live in the objects that derive them. Knows no torch.
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
    """The model and how its text side behaves."""

    model: str = Field(
        "",
        description="Folder of a Hugging Face checkpoint, or the name of a model at a hub (org/model), which is "
        "fetched; none, or demo: the demo model that ships with frame.",
    )
    model_plugin: str | None = Field(
        None,
        description="Model plugin (PACKAGE:NAME) that serves the checkpoint, whatever its config.json says; default: "
        "that of its architecture, frame's own before others'.",
    )
    revision: str | None = Field(
        None, description="Branch, tag or commit at the hub; of a folder: a subfolder, or a name under `snapshots/`."
    )
    tokenizer: str | None = Field(None, description="Folder or name at a hub of the tokenizer; default: the model's.")
    skip_tokenizer_init: bool = Field(False, description="Load no tokenizer: token ids in, token ids out.")
    served_model_name: list[str] = Field(
        default_factory=list, description="Names that requests may use; the first is echoed."
    )
    dtype: Literal["auto", "float32", "float16", "bfloat16"] = Field(
        "auto", description="Type of weights and activations; auto takes the checkpoint's, or what suits the platform."
    )
    max_model_len: int | None = Field(
        None, ge=-1, description="Most tokens of prompt and output; default: the model's; -1: what fits in memory."
    )
    hf_overrides: Mapping[str, Any] = Field(
        default_factory=dict, description="Values merged into the checkpoint's config.json, nested."
    )
    generation_config: str = Field(
        "auto", description="Source of default sampling values: auto (the checkpoint), frame (none) or a folder."
    )
    override_generation_config: Mapping[str, Any] = Field(
        default_factory=dict, description="Values merged over the generation config."
    )
    runner: Literal["auto", "generate", "pooling"] = Field(
        "auto", description="What the engine does: generate text, or pool (embed, classify); auto asks the checkpoint."
    )
    convert: Literal["auto", "none", "embed", "classify", "reward"] = Field(
        "auto", description="What a pooling engine makes of a model; auto follows the architecture."
    )
    max_logprobs: int = Field(
        20, ge=-1, description="Most log-probabilities that a request may ask for; -1: the vocabulary."
    )
    logprobs_mode: Literal["raw_logprobs", "processed_logprobs", "raw_logits", "processed_logits"] = Field(
        "raw_logprobs",
        description="What is returned as log-probability: before or after processing, normalised or not.",
    )
    logits_processors: list[Any] = Field(
        default_factory=list,
        description="Logits processors to load: plugin names, dotted paths, or classes (Python only).",
    )
    chat_template_content_format: Literal["auto", "string", "openai"] = Field(
        "auto", description="What templates get as content: texts joined (string), parts (openai), or as sent (auto)."
    )
    chat_template: str | None = Field(
        None, description="Chat template: a file or the template itself; default: the checkpoint's."
    )
    seed: int = Field(0, description="Seed for requests that bring none.")
    deterministic: bool = Field(False, description="Every request gives the same bits whatever it is batched with.")

    @field_serializer("logits_processors", when_used="json")
    def _name_classes(self, processors: list[Any]) -> list[str]:
        """Classes travel between processes by name only; one that cannot be imported there is refused."""
        names = []
        for processor in processors:
            name = processor if isinstance(processor, str) else f"{processor.__module__}:{processor.__qualname__}"
            if name.startswith("__main__:") or "<locals>" in name:
                raise ValueError(f"logits processor {name} cannot be imported by another process; put it in a module")
            names.append(name)
        return names


class PoolerConfig(Section):
    """How pooling models make vectors. None: what the checkpoint says."""

    pooling_type: str = Field("auto", description="Pooler plugin: cls, last, mean, all or step.")
    normalize: bool | None = Field(None, description="Scale embeddings to length 1.")
    dimensions: int | None = Field(None, ge=1, description="Numbers of an embedding that are kept (Matryoshka models).")
    use_activation: bool | None = Field(None, description="Turn the scores of classes into probabilities.")
    pooler_logit_bias: float | None = Field(None, description="Taken off the scores of classes before activation.")
    step_tag_id: int | None = Field(None, ge=0, description="Token whose places the step pooler scores.")
    returned_token_ids: list[int] | None = Field(
        None, description="Scores that are returned, by index (reward models with a vocabulary head)."
    )
    enable_chunked_processing: bool = Field(
        False, description="Embed texts above max_model_len in parts, and average these by length."
    )
    max_embed_len: int | None = Field(
        None, ge=1, description="Most tokens of a text embedded in parts; default: as many as a request may hold."
    )


class CacheConfig(Section):
    """The KV cache."""

    block_size: int = Field(16, ge=1, le=256, description="Tokens in a block.")
    gpu_memory_utilization: float = Field(
        0.9, gt=0, le=1, description="Share of the device's memory that this engine may use."
    )
    kv_cache_memory_bytes: int | None = Field(None, ge=1, description="Bytes of KV cache; beats the share.")
    num_gpu_blocks_override: int | None = Field(None, ge=2, description="Blocks of KV cache; beats both.")
    kv_cache_dtype: Literal["auto", "float32", "float16", "bfloat16", "fp8_e4m3", "fp8_e5m2"] = Field(
        "auto", description="Type of cached keys and values; auto is the model's; fp8 types keep twice as many tokens."
    )
    enable_prefix_caching: bool = Field(True, description="Reuse blocks of equal prompt prefixes.")
    prefix_caching_hash_algo: Literal["sha256", "xxhash"] = Field(
        "sha256",
        description="Hash of blocks, over a canonical encoding; xxhash needs the package and trusts every caller.",
    )


class SchedulerConfig(Section):
    """How tokens are planned into steps."""

    max_num_batched_tokens: int = Field(0, ge=0, description="Most tokens in a step; 0: what the platform suggests.")
    max_num_seqs: int = Field(
        0, ge=0, le=65535, description="Most requests that run at once; 0: what the platform suggests."
    )
    enable_chunked_prefill: bool = Field(True, description="Split prompts over steps.")
    max_num_partial_prefills: int = Field(1, ge=1, description="Prompts that may be partly computed at the same time.")
    max_long_partial_prefills: int = Field(
        1, ge=1, description="The same for long prompts; lower lets short prompts pass."
    )
    long_prefill_token_threshold: int = Field(
        0, ge=0, description="Tokens from which a prompt is long; also the most of one prompt in a step; 0: no limit."
    )
    scheduling_policy: str = Field(
        "fcfs", description="Order of requests: a scheduler plugin's name; default with API keys: fair."
    )
    async_scheduling: bool = Field(True, description="Plan the next step before the tokens of this one have arrived.")
    stream_interval: int = Field(1, ge=1, description="Tokens in a streamed output.")
    max_queue: int = Field(4096, ge=1, description="Requests that may wait; more are refused.")

    @model_validator(mode="after")
    def _check_partial_prefills(self) -> Self:
        if self.max_long_partial_prefills > self.max_num_partial_prefills:
            raise ValueError(
                f"max_long_partial_prefills {self.max_long_partial_prefills} is above "
                f"max_num_partial_prefills {self.max_num_partial_prefills}"
            )
        return self


class ExecutorConfig(Section):
    """Where workers run."""

    platform: str = Field("auto", description="Platform plugin.")
    executor: str = Field("inline", description="Executor plugin: inline (this process) or process.")
    tensor_parallel_size: int = Field(1, ge=1, description="Devices that share each layer.")
    pipeline_parallel_size: int = Field(1, ge=1, description="Devices that share the layers in stages.")
    enforce_eager: bool = Field(False, description="Record no graphs.")
    num_threads: int | None = Field(
        None, ge=1, description="CPU threads of a worker; default: one for each processor that it may use."
    )


class AttentionConfig(Section):
    """Attention backends."""

    attention_backend: str = Field("auto", description="Attention backend plugin.")
    shared_prefix_min_tokens: int | None = Field(
        None,
        ge=0,
        description="Tokens that a decode step must save reading, by reading a prefix that requests share once for "
        "many of them, to do so; for backends that can. 0: never. Default: as the backend's costs say that it pays.",
    )


class SpeculationConfig(Section):
    """Guessing several tokens that one step then checks; what is generated stays the same."""

    speculator: str | None = Field(None, description="Speculator plugin; default: none.")
    num_speculative_tokens: int = Field(5, ge=1, le=64, description="Most drafts of a request in a step.")
    disable_by_batch_size: int | None = Field(
        None, ge=1, description="No drafts while more requests than this run; default: no limit."
    )


class LoadConfig(Section):
    """Fetching models and reading weights."""

    model_source: str = Field(
        "auto", description="Model source plugin that fetches models by name; auto takes one that knows such names."
    )
    load_format: str = Field(
        "auto",
        description="Weight loader plugin; auto takes the one that supports the folder; dummy makes random weights.",
    )
    download_dir: str | None = Field(
        None, description="Folder for fetched models; default: the model source's own (hub: Hugging Face's cache)."
    )
    offline: bool = Field(False, description="Fetch nothing; use what was fetched before.")


class TransferConfig(Section):
    """Moving KV blocks elsewhere."""

    kv_connector: str | None = Field(None, description="KV connector plugin.")
    kv_role: Literal["both", "producer", "consumer"] = Field(
        "both", description="Whether this engine loads, saves or both."
    )
    kv_load_failure_policy: Literal["recompute", "fail"] = Field(
        "recompute", description="What happens to a request whose blocks could not be loaded."
    )


class StructuredOutputsConfig(Section):
    """Grammars that outputs must obey."""

    structured_outputs_backend: str = Field("auto", description="Grammar backend plugin.")
    disable_any_whitespace: bool = Field(False, description="No white space between the parts of JSON, unless asked.")
    any_whitespace: bool = Field(
        False,
        description="Any white space between the parts of JSON, up to 64 characters, not only a space after , and :.",
    )
    disable_additional_properties: bool = Field(
        False, description="JSON objects have no properties but those that their schema names, unless it says so."
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
    grammar_cache_bytes: int = Field(256 << 20, ge=0, description="Bytes of compiled grammars that are kept.")


class ObservabilityConfig(Section):
    """Statistics and profiles."""

    disable_log_stats: bool = Field(True, description="Keep no statistics for `get_metrics`.")
    metrics_sinks: list[str] = Field(
        default_factory=list, description="Plugins that hear of every finished request, such as log and otel."
    )
    vllm_metrics: bool = Field(False, description="Expose metrics under vLLM's names (`vllm:…`), too.")
    profile_dir: str | None = Field(None, description="Absolute folder for profiler traces.")

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
        """The tree from flat names, as `LLM(**values)` takes them; None means the default. Raises `ConfigError`."""
        from .flat import from_flat

        return from_flat(values)

    def to_plain(self) -> dict[str, Any]:
        """The settings as JSON values, for other processes; raises `ConfigError` for a class that only lives here."""
        try:
            return self.model_dump(mode="json")
        except PydanticSerializationError as error:
            reason = str(error).removeprefix("Error serializing to JSON: ").rpartition("ValueError: ")[2]
            raise ConfigError(f"the configuration cannot be given to another process: {reason}") from None
