"""vLLM's argument names and values, for scripts that change one word.

`TRANSLATIONS` mean the same under another name here; those of `unused` have nothing to act on. Knows names only; the
settings are in the tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from frame.core.config.errors import ConfigError
from frame.core.config.mappings import merge

from .unused import UNUSED

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
SHORT_FLAGS: Mapping[str, str] = MappingProxyType({
    "-tp": "tensor_parallel_size",
    "-pp": "pipeline_parallel_size",
    "-asc": "api_server_count",
    "-O": "optimization_level",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-sc": "speculative_config",
    **{unused.short: name for name, unused in UNUSED.items() if unused.short},
})  # fmt: skip


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


def _optimization_level(value: Any) -> dict[str, Any]:
    """-O0 is eager; the other levels differ in what vLLM compiles, of which there is nothing here."""
    levels = {"0": True, "1": False, "2": False, "3": False}
    text = str(value).upper().removeprefix("O")
    if text not in levels:
        raise ConfigError(f"no optimization_level {value!r}; there are: 0, 1, 2, 3")
    return {"enforce_eager": True} if levels[text] else {}


#: Keys of vLLM's CompilationConfig that tune its compiler, which is not here.
_COMPILER_KEYS = frozenset((
    "backend", "cache_dir", "compile_cache_save_format", "compile_mm_encoder", "compile_ranges_endpoints",
    "compile_ranges_split_points", "compile_sizes", "cudagraph_copy_inputs", "cudagraph_num_of_warmups",
    "cudagraph_specialize_lora", "custom_ops", "debug_dump_path", "dynamic_shapes_config", "fast_moe_cold_start",
    "inductor_compile_config", "inductor_passes", "local_cache_dir", "pass_config", "splitting_ops", "use_inductor",
    "use_inductor_graph_partition", "ir_enable_torch_wrap", "evaluate_guards",
))  # fmt: skip


def _compilation(value: Any) -> dict[str, Any]:
    """Whether steps are recorded as CUDA graphs, and in which sizes; keys of the compiler change nothing."""
    given = dict(value) if isinstance(value, Mapping) else {"mode": value}
    settings: dict[str, Any] = {}
    mode, level = given.pop("mode", None), given.pop("level", None)
    graphs = given.pop("cudagraph_mode", None)
    if str(graphs or "").upper() in ("NONE", "0") or (
        graphs is None and str(mode if mode is not None else level) == "0"
    ):
        settings["enforce_eager"] = True
    sizes, largest = given.pop("cudagraph_capture_sizes", None), given.pop("max_cudagraph_capture_size", None)
    settings |= _graph_sizes(sizes) if sizes else {} if largest is None else _largest_graph(largest)
    unknown = sorted(set(given) - _COMPILER_KEYS)
    if unknown:
        choices = "mode, cudagraph_mode, cudagraph_capture_sizes, max_cudagraph_capture_size"
        raise ConfigError(f"compilation_config has no {', '.join(unknown)} here; there are: {choices}")
    return settings


def _graph_sizes(value: Any) -> dict[str, Any]:
    sizes = value if isinstance(value, list) else [value]
    return {"plugin": {"cuda": {"graph_sizes": sizes}}}


def _largest_graph(value: Any) -> dict[str, Any]:
    """The sizes that the CUDA platform has by default, as far as the largest that is asked for."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"max_cudagraph_capture_size must be a whole number of at least 0, got {value!r:.50}")
    if value == 0:
        return {"enforce_eager": True}
    steps = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
    return _graph_sizes([*(size for size in steps if size < value), value])


def _draft_model(value: Any) -> dict[str, Any]:
    if value in ("ngram", "[ngram]"):
        return {"speculator": "ngram"}
    raise ConfigError(
        f"spec_model={value!r:.200} cannot be honoured: there are no draft models yet; give --spec-method ngram"
    )


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
    "spec_method": lambda value: {"speculator": value},
    "spec_tokens": lambda value: {"num_speculative_tokens": value},
    "spec_model": _draft_model,
    "optimization_level": _optimization_level,
    "compilation_config": _compilation,
    "cudagraph_capture_sizes": _graph_sizes,
    "cuda_graph_sizes": _graph_sizes,
    "max_cudagraph_capture_size": _largest_graph,
    "disable_cascade_attn": lambda value: {"shared_prefix_min_tokens": 0} if value else {},
    "shutdown_timeout": lambda value: {"drain_seconds": float(value)},
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
    (
        "disable_uvicorn_access_log",
        "disable_fastapi_docs",
        "enable_log_requests",
        "enable_log_outputs",
        "disable_cascade_attn",
    )
)

#: Those whose flag takes several values.
LISTS = frozenset((
    "cudagraph_capture_sizes", "cuda_graph_sizes", "kv_cache_dtype_skip_layers", "lora_target_modules", "lora_modules",
    "numa_bind_nodes", "numa_bind_cpus", "cpu_offload_params", "offload_params", "allowed_media_domains",
    "collect_detailed_traces", "ignore_patterns",
))  # fmt: skip

#: Settings that several of the others add to, and the user as well.
_JOINED = ("metrics_sinks", "plugin")


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
