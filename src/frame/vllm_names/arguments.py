"""vLLM's argument names and values, for scripts that change one word.

`TRANSLATIONS` mean the same under another name here. `UNUSED` have nothing to act on: a value in `harmless` is
accepted, any other is refused with the reason. Knows names only; the settings are in the tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from frame.core.config.errors import ConfigError
from frame.core.config.mappings import merge

logger = logging.getLogger(__name__)

#: Other spellings of values: (setting, value) → our value.
VALUES: Mapping[tuple[str, str], str] = MappingProxyType({
    ("dtype", "half"): "float16",
    ("dtype", "float"): "float32",
    ("kv_cache_dtype", "fp8"): "fp8_e4m3",
    ("generation_config", "vllm"): "frame",
    ("prefix_caching_hash_algo", "sha256_cbor"): "sha256",
    ("prefix_caching_hash_algo", "xxhash_cbor"): "xxhash",
    ("kv_role", "kv_both"): "both",
    ("kv_role", "kv_producer"): "producer",
    ("kv_role", "kv_consumer"): "consumer",
})  # fmt: skip

#: Short flags: flag → setting.
SHORT_FLAGS: Mapping[str, str] = MappingProxyType({"-tp": "tensor_parallel_size", "-pp": "pipeline_parallel_size"})


@dataclass(frozen=True)
class Unused:
    """An argument without a part to act on. `harmless` None: every value is; `switch`: its flag takes no value."""

    reason: str
    harmless: tuple[Any, ...] | None = None
    switch: bool = False


def _executor(value: Any) -> dict[str, Any]:
    return {"executor": {"uni": "inline", "mp": "process"}.get(value, value)}


def _transfer(value: Any) -> dict[str, Any]:
    given = dict(value)
    settings = {
        name: given.pop(name) for name in ("kv_connector", "kv_role", "kv_load_failure_policy") if name in given
    }
    extra = given.pop("kv_connector_extra_config", None)
    if given:
        choices = "kv_connector, kv_role, kv_load_failure_policy, kv_connector_extra_config"
        raise ConfigError(f"kv_transfer_config has no {', '.join(sorted(given))} here; there are: {choices}")
    if extra:
        settings["plugin"] = {settings.get("kv_connector", ""): extra}
    return settings


def _speculative(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"speculative_config must be a mapping, got {value!r:.200}")
    given = {name: one for name, one in value.items() if one is not None}
    if given.get("model") in ("ngram", "[ngram]"):
        given.setdefault("method", given.pop("model").strip("[]"))
    settings = {name: given.pop(name) for name in ("num_speculative_tokens", "disable_by_batch_size") if name in given}
    if "method" in given:
        settings["speculator"] = given.pop("method")
    elif settings or given:
        raise ConfigError("speculative_config needs a method, the name of a speculator (`frame plugins` lists them)")
    if given:
        settings["plugin"] = {str(settings["speculator"]): given}
    return settings


def _attention(value: Any) -> dict[str, Any]:
    given = dict(value)
    backend = given.pop("backend", None)
    if given:
        raise ConfigError(f"attention_config has no {', '.join(sorted(given))} here; there is: backend")
    return {} if backend is None else {"attention_backend": backend}


def _structured_outputs(value: Any) -> dict[str, Any]:
    given = dict(value)
    settings = {
        name: given.pop(name) for name in ("disable_any_whitespace", "disable_additional_properties") if name in given
    }
    if (backend := given.pop("backend", None)) is not None:
        settings["structured_outputs_backend"] = backend
    given.pop("disable_fallback", None)  # there is nothing to fall back to
    if given:
        choices = "backend, disable_any_whitespace, disable_additional_properties, disable_fallback"
        raise ConfigError(f"structured_outputs_config has no {', '.join(sorted(given))} here; there are: {choices}")
    return settings


def _profiler(value: Any) -> dict[str, Any]:
    given = dict(value)
    folder = given.pop("torch_profiler_dir", None)
    if given.pop("profiler", None) not in (None, "torch") or given:
        raise ConfigError(f"profiler_config {value!r} cannot be honoured; there is: torch_profiler_dir")
    return {"profile_dir": folder} if folder else {}


#: Keys of vLLM's PoolerConfig that have another name here.
_POOLER_NAMES: Mapping[Any, str] = {
    "logit_bias": "pooler_logit_bias",
    "softmax": "use_activation",
    "activation": "use_activation",
}


def _pooler(value: Any) -> dict[str, Any]:
    given = value if isinstance(value, Mapping) else vars(value)
    return {_POOLER_NAMES.get(name, str(name)): part for name, part in given.items() if part is not None}


#: vLLM's older word for runner and convert.
_TASKS: Mapping[str, Mapping[str, Any]] = MappingProxyType({
    "auto": {},
    "generate": {"runner": "generate"},
    "embed": {"runner": "pooling", "convert": "embed"},
    "embedding": {"runner": "pooling", "convert": "embed"},
    "classify": {"runner": "pooling", "convert": "classify"},
    "score": {"runner": "pooling", "convert": "classify"},
    "reward": {"runner": "pooling", "convert": "reward"},
})  # fmt: skip


def _task(value: Any) -> dict[str, Any]:
    if value not in _TASKS:
        raise ConfigError(f"no task {value!r}; there are: {', '.join(_TASKS)}")
    return dict(_TASKS[value])


#: Arguments under another name here: name → the settings that it stands for.
TRANSLATIONS: Mapping[str, Callable[[Any], dict[str, Any]]] = MappingProxyType({
    "distributed_executor_backend": _executor,
    "kv_transfer_config": _transfer,
    "attention_config": _attention,
    "speculative_config": _speculative,
    "profiler_config": _profiler,
    "structured_outputs_config": _structured_outputs,
    "guided_decoding_backend": lambda value: {"structured_outputs_backend": value},
    "pooler_config": _pooler,
    "task": _task,
    "device": lambda value: {"platform": value},
    "disable_uvicorn_access_log": lambda value: {"disable_access_log": value},
    "disable_fastapi_docs": lambda value: {"openapi": not value},
    "h11_max_incomplete_event_size": lambda value: {"max_head_bytes": value},
    "h11_max_header_count": lambda value: {"max_headers": value},
    "enable_log_requests": lambda value: {"metrics_sinks": ["log"]} if value else {},
    "enable_log_outputs": lambda value: {"plugin": {"log": {"outputs": value}}} if value else {},
    "max_log_len": lambda value: {"plugin": {"log": {"max_chars": value}}},
    "otlp_traces_endpoint": lambda value: {"metrics_sinks": ["otel"], "plugin": {"otel": {"endpoint": value}}},
})  # fmt: skip

#: Those of them whose flag takes no value.
SWITCHES = frozenset(
    ("disable_uvicorn_access_log", "disable_fastapi_docs", "enable_log_requests", "enable_log_outputs")
)

_NO_EFFECT = "it has no effect here"
_MEDIA = "models take text only"
_NO_LORA = "adapters are not supported yet"
_NO_DP = "data and context parallelism are not supported yet"
_OFF = (None, False)

#: Settings that several of the others add to, and the user as well.
_JOINED = ("metrics_sinks", "plugin")

#: Arguments that nothing here acts on.
UNUSED: Mapping[str, Unused] = MappingProxyType({
    "additional_config": Unused("platforms take settings through plugin options", (None, {})),
    "allowed_local_media_path": Unused(_MEDIA, (None, "")),
    "allowed_media_domains": Unused(_MEDIA, (None, [])),
    "calculate_kv_scales": Unused("scales of a quantised cache are not supported yet", _OFF, switch=True),
    "code_revision": Unused("no code of a checkpoint is run", (None,)),
    "collect_detailed_traces": Unused("traces have queue, prefill and decode; give --metrics-sinks otel", (None, [])),
    "compilation_config": Unused(_NO_EFFECT),
    "config_format": Unused("only Hugging Face folders are read", (None, "auto", "hf")),
    "cpu_offload_gb": Unused("weights stay on the device", (None, 0, 0.0)),
    "cuda_graph_sizes": Unused(_NO_EFFECT),
    "data_parallel_size": Unused(_NO_DP, (None, 1)),
    "data_parallel_size_local": Unused(_NO_DP, (None, 1)),
    "decode_context_parallel_size": Unused(_NO_DP, (None, 1)),
    "disable_cascade_attn": Unused(_NO_EFFECT, switch=True),
    "disable_custom_all_reduce": Unused(_NO_EFFECT, switch=True),
    "disable_frontend_multiprocessing": Unused(_NO_EFFECT, switch=True),
    "disable_hybrid_kv_cache_manager": Unused("layers of each kind have their own blocks", _OFF, switch=True),
    "disable_log_requests": Unused(_NO_EFFECT, switch=True),
    "disable_mm_preprocessor_cache": Unused(_NO_EFFECT, switch=True),
    "disable_sliding_window": Unused("give --max-model-len instead", _OFF, switch=True),
    "download_dir": Unused("nothing is downloaded", (None, "")),
    "enable_eplb": Unused("expert parallelism is not supported yet", _OFF, switch=True),
    "enable_expert_parallel": Unused("expert parallelism is not supported yet", _OFF, switch=True),
    "enable_lora": Unused(_NO_LORA, _OFF, switch=True),
    "enable_mm_embeds": Unused(_MEDIA, _OFF, switch=True),
    "enable_prompt_embeds": Unused("prompts are text or token ids", _OFF, switch=True),
    "enable_return_routed_experts": Unused("chosen experts are not reported yet", _OFF, switch=True),
    "enable_server_load_tracking": Unused(_NO_EFFECT, switch=True),
    "enable_sleep_mode": Unused("a CPU engine sleeps without it, a CUDA engine not yet", _OFF, switch=True),
    "headless": Unused("engines without API processes belong to data parallelism", _OFF, switch=True),
    "hf_config_path": Unused("the configuration is read from the model's folder", (None,)),
    "hf_token": Unused("nothing is downloaded", (None,)),
    "ignore_patterns": Unused(_NO_EFFECT),
    "io_processor_plugin": Unused("input processors are not supported yet", (None,)),
    "kv_events_config": Unused("cache events are not published yet", (None,)),
    "kv_offloading_size": Unused("give --kv-connector instead", (None, 0)),
    "kv_sharing_fast_prefill": Unused(_NO_EFFECT, _OFF, switch=True),
    "limit_mm_per_prompt": Unused(_MEDIA, (None, {})),
    "log_config_file": Unused("give --log-level", (None, "")),
    "log_error_stack": Unused("tracebacks of defects are logged always", switch=True),
    "logits_processor_pattern": Unused("requests cannot name processors", (None,)),
    "lora_modules": Unused(_NO_LORA, (None, [], "")),
    "max_cpu_loras": Unused(_NO_LORA, (None,)),
    "max_lora_rank": Unused(_NO_EFFECT),
    "max_loras": Unused(_NO_EFFECT),
    "max_num_on_the_fly": Unused(_NO_EFFECT),
    "max_parallel_loading_workers": Unused(_NO_EFFECT),
    "max_seq_len_to_capture": Unused(_NO_EFFECT),
    "mm_processor_cache_gb": Unused(_NO_EFFECT),
    "mm_processor_kwargs": Unused(_MEDIA, (None, {})),
    "model_impl": Unused("the implementation follows from the architecture", (None, "auto", "frame", "vllm")),
    "model_loader_extra_config": Unused("give --plugin.LOADER.FIELD instead", (None, {})),
    "nnodes": Unused("engines run on one machine", (None, 1)),
    "num_lookahead_slots": Unused(_NO_EFFECT),
    "optimization_level": Unused(_NO_EFFECT),
    "preemption_mode": Unused(_NO_EFFECT),
    "pt_load_map_location": Unused(_NO_EFFECT),
    "quantization": Unused("quantised weights are not supported yet", (None,)),
    "quantization_param_path": Unused("quantised weights are not supported yet", (None,)),
    "ray_workers_use_nsight": Unused("Ray is not supported yet", _OFF, switch=True),
    "rope_scaling": Unused('give hf_overrides={"rope_parameters": …} instead', (None, {})),
    "rope_theta": Unused('give hf_overrides={"rope_parameters": …} instead', (None,)),
    "safetensors_load_strategy": Unused(_NO_EFFECT),
    "scheduler_cls": Unused("give --scheduling-policy, the name of a plugin", (None,)),
    "show_hidden_metrics_for_version": Unused(_NO_EFFECT),
    "swap_space": Unused(_NO_EFFECT),
    "tokenizer_mode": Unused("tokenizers are read by transformers", (None, "auto", "hf", "fast")),
    "tokenizer_revision": Unused("give --tokenizer, a folder", (None,)),
    "trust_remote_code": Unused("no code of a checkpoint is ever run", _OFF, switch=True),
    "use_tqdm_on_load": Unused(_NO_EFFECT, switch=True),
    "worker_cls": Unused("give --platform or --executor, names of plugins", (None, "auto")),
    "worker_extension_cls": Unused("pass a function to collective_rpc instead", (None, "")),
})  # fmt: skip


def translate(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`values` in our names: translated, without what nothing acts on. None always means the default.

    `defaults` are those of our settings: a value that equals its default contradicts no translation. Raises
    `ConfigError` for an argument that would have to do something and cannot.
    """
    own: dict[str, Any] = {}
    joined: dict[str, Any] = {}
    ignored: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        if name in UNUSED:
            unused = UNUSED[name]
            if unused.harmless is not None and value not in unused.harmless:
                raise ConfigError(f"{name}={value!r} cannot be honoured: {unused.reason}")
            if unused.harmless is None:
                ignored.append(name)
        elif name in TRANSLATIONS:
            for key, part in TRANSLATIONS[name](value).items():
                if key in _JOINED:
                    joined[key] = _join(joined.get(key), part)
                    continue
                if values.get(key) not in (None, defaults.get(key), part):
                    raise ConfigError(f"{name} says {key}={part!r}, but {key}={values[key]!r} is given too")
                own[key] = _own_value(key, part)
        else:
            own[name] = _own_value(name, value)
    if ignored:
        logger.warning("without effect here: %s", ", ".join(sorted(ignored)))
    return own | {key: _join(part, own.get(key)) for key, part in joined.items()}


def _join(first: Any, second: Any) -> Any:
    """Both lists, or both mappings; the second wins."""
    if not first or not second:
        return first or second
    if isinstance(first, list):
        return [*first, *(item for item in second if item not in first)]
    return merge(first, second)


def _own_value(name: str, value: Any) -> Any:
    return VALUES.get((name, value), value) if isinstance(value, str) else value
