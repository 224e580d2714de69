"""vLLM's argument names and values, for scripts that change one word.

`TRANSLATIONS` holds the arguments that frame has under another name, `unused` those that it does not use. Knows names
only; the settings are in the tree.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from frame.core.config.errors import ConfigError
from frame.core.config.mappings import merge
from frame.quoting import quoted

from .kv_events import KV_EVENTS_FIELDS, kv_events_settings
from .kv_transfer import KV_TRANSFER_FIELDS, kv_transfer_settings
from .unused import UNUSED

logger = logging.getLogger(__name__)

#: Other spellings of values: (setting, value) → our value.
VALUES: Mapping[tuple[str, str], str] = MappingProxyType({
    ("dtype", "half"): "float16",
    ("dtype", "float"): "float32",
    ("kv_cache_dtype", "fp8"): "fp8_e4m3",
    ("generation_config", "vllm"): "frame",
    ("model_impl", "vllm"): "frame",
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
    "-dcp": "decode_context_parallel_size",
    "-pcp": "prefill_context_parallel_size",
    "-ep": "enable_expert_parallel",
    "-q": "quantization",
    "-dp": "data_parallel_size",
    "-dpl": "data_parallel_size_local",
    "-dpr": "data_parallel_start_rank",
    "-dpn": "data_parallel_rank",
    "-dpa": "data_parallel_address",
    "-dpp": "data_parallel_rpc_port",
    "-dph": "data_parallel_hybrid_lb",
    "-dpe": "data_parallel_external_lb",
    "-asc": "api_server_count",
    "-O": "optimization_level",
    "-cc": "compilation_config",
    "-ac": "attention_config",
    "-sc": "speculative_config",
    **{unused.short: name for name, unused in UNUSED.items() if unused.short},
})  # fmt: skip


def _fields(argument: str, value: Any) -> dict[str, Any]:
    """The fields of a mapping, or of an object of one of vLLM's configuration classes; raises `ConfigError`."""
    found = value if isinstance(value, Mapping) else getattr(value, "__dict__", None)
    if found is None or not all(isinstance(name, str) for name in found):
        raise ConfigError(f"{argument} must be a mapping of names to values, got {quoted(value)}")
    return {name: field for name, field in found.items() if field is not None}


def _none_left(argument: str, fields: Mapping[str, Any], *known: str) -> None:
    """Raises `ConfigError` naming `fields` that no part of frame takes and those that `argument` may have."""
    if fields:
        verb = "is" if len(known) == 1 else "are"
        raise ConfigError(f"{argument} has no {', '.join(sorted(fields))} here; there {verb}: {', '.join(known)}")


def _one_of(argument: str, value: Any, known: Mapping[str, Any]) -> Any:
    """Looks up a value, a name in any case or a number, in `known`; raises `ConfigError` for another one."""
    name = str(getattr(value, "name", value)).upper()
    if name not in known:
        raise ConfigError(f"no {argument} {quoted(value)}; there are: {', '.join(known)}")
    return known[name]


def _executor(value: Any) -> dict[str, Any]:
    return {
        "executor": {"uni": "inline", "mp": "process", "external_launcher": "external"}.get(value, value)
        if isinstance(value, str)
        else value
    }


def _transfer(value: Any) -> dict[str, Any]:
    given = _fields("kv_transfer_config", value)
    settings = kv_transfer_settings(given)
    _none_left("kv_transfer_config", given, *KV_TRANSFER_FIELDS)
    return settings


def _offloading_size(value: Any) -> dict[str, Any]:
    try:
        size = -1.0 if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        size = -1.0
    if not size >= 0:
        raise ConfigError(f"kv_offloading_size must be a number of GiB, 0 or more, got {quoted(value)}")
    return {"kv_connector": "offload", "plugin": {"offload": {"size": value}}} if size else {}


def _kv_events(value: Any) -> dict[str, Any]:
    given = _fields("kv_events_config", value)
    settings = kv_events_settings(given)
    _none_left("kv_events_config", given, *KV_EVENTS_FIELDS)
    return settings


def _speculative(value: Any) -> dict[str, Any]:
    given = _fields("speculative_config", value)
    if given.get("model") in ("ngram", "[ngram]"):
        given.setdefault("method", given.pop("model").strip("[]"))
    names = ("num_speculative_tokens", "disable_by_batch_size")
    settings: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
    if "method" in given:
        settings["speculator"] = given.pop("method")
    elif settings or given:
        raise ConfigError("speculative_config needs a method, the name of a speculator (`frame plugins` lists them)")
    if given:
        settings["plugin"] = {str(settings["speculator"]): given}
    return settings


def _balance(value: Any) -> dict[str, Any]:
    given = _fields("eplb_config", value)
    names = {
        "window_size": "eplb_window_size",
        "step_interval": "eplb_step_interval",
        "num_redundant_experts": "num_redundant_experts",
        "log_balancedness": "eplb_log_balancedness",
        "use_async": "eplb_use_async",
    }
    settings: dict[str, Any] = {names[name]: given.pop(name) for name in names if name in given}
    policy = given.pop("policy", "default")
    given.pop("log_balancedness_interval", None)  # it is logged at each placement
    _none_left("eplb_config", given, *names, "policy", "log_balancedness_interval")
    return settings | ({} if policy == "default" else {"expert_balancer": policy})


def _attention(value: Any) -> dict[str, Any]:
    given = _fields("attention_config", value)
    backend = given.pop("backend", None)
    _none_left("attention_config", given, "backend")
    return {} if backend is None else {"attention_backend": backend}


def _structured_outputs(value: Any) -> dict[str, Any]:
    given = _fields("structured_outputs_config", value)
    names = ("disable_any_whitespace", "disable_additional_properties")
    settings: dict[str, Any] = {name: given.pop(name) for name in names if name in given}
    if (backend := given.pop("backend", None)) is not None:
        settings["structured_outputs_backend"] = backend
    given.pop("disable_fallback", None)  # frame has one grammar backend at a time, so there is no fallback
    _none_left("structured_outputs_config", given, "backend", *names, "disable_fallback")
    return settings


def _profiler(value: Any) -> dict[str, Any]:
    given = _fields("profiler_config", value)
    folder = given.pop("torch_profiler_dir", None)
    if given.pop("profiler", None) not in (None, "torch") or given:
        raise ConfigError(f"profiler_config {quoted(value)} cannot be honoured; there is: torch_profiler_dir")
    return {"profile_dir": folder} if folder else {}


#: Keys of vLLM's PoolerConfig that have another name here.
_POOLER_NAMES: Mapping[Any, str] = {
    "logit_bias": "pooler_logit_bias",
    "softmax": "use_activation",
    "activation": "use_activation",
}


def _pooler(value: Any) -> dict[str, Any]:
    return {_POOLER_NAMES.get(name, name): field for name, field in _fields("pooler_config", value).items()}


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
    if not isinstance(value, str) or value not in _TASKS:
        raise ConfigError(f"no task {quoted(value)}; there are: {', '.join(_TASKS)}")
    return dict(_TASKS[value])


def _optimization_level(value: Any) -> dict[str, Any]:
    """-O0 runs steps eagerly. The other levels differ in what vLLM compiles, and frame compiles none of it."""
    levels = {"0": True, "1": False, "2": False, "3": False}
    text = str(value).upper().removeprefix("O")
    if text not in levels:
        raise ConfigError(f"no optimization_level {quoted(value)}; there are: 0, 1, 2, 3")
    return {"enforce_eager": True} if levels[text] else {}


#: vLLM's compilation modes and CUDA graph modes: whether each runs steps eagerly.
_MODES: Mapping[str, bool] = MappingProxyType({
    "NONE": True, "STOCK_TORCH_COMPILE": False, "DYNAMO_TRACE_ONCE": False, "VLLM_COMPILE": False,
    "0": True, "1": False, "2": False, "3": False,
})  # fmt: skip
_GRAPH_MODES: Mapping[str, bool] = MappingProxyType({
    "NONE": True, "PIECEWISE": False, "FULL": False, "FULL_DECODE_ONLY": False, "FULL_AND_PIECEWISE": False,
    "0": True, "1": False, "2": False,
})  # fmt: skip

#: Keys of vLLM's CompilationConfig that tune its compiler, which frame does not have.
_COMPILER_KEYS = frozenset((
    "backend", "cache_dir", "compile_cache_save_format", "compile_mm_encoder", "compile_ranges_endpoints",
    "compile_ranges_split_points", "compile_sizes", "cudagraph_copy_inputs", "cudagraph_num_of_warmups",
    "cudagraph_specialize_lora", "custom_ops", "debug_dump_path", "dynamic_shapes_config", "fast_moe_cold_start",
    "inductor_compile_config", "inductor_passes", "local_cache_dir", "pass_config", "splitting_ops", "use_inductor",
    "use_inductor_graph_partition", "ir_enable_torch_wrap", "evaluate_guards",
))  # fmt: skip


def _compilation(value: Any) -> dict[str, Any]:
    """Whether steps are recorded as CUDA graphs, and for which batch sizes; keys of vLLM's compiler change nothing."""
    given = {"mode": value} if isinstance(value, int | str) else _fields("compilation_config", value)
    settings: dict[str, Any] = {}
    mode, level, graphs = given.pop("mode", None), given.pop("level", None), given.pop("cudagraph_mode", None)
    mode = level if mode is None else mode
    no_compiler = mode is not None and _one_of("compilation_config.mode", mode, _MODES)
    if no_compiler if graphs is None else _one_of("compilation_config.cudagraph_mode", graphs, _GRAPH_MODES):
        settings["enforce_eager"] = True
    sizes, largest = given.pop("cudagraph_capture_sizes", None), given.pop("max_cudagraph_capture_size", None)
    settings |= _graph_sizes(sizes) if sizes else {} if largest is None else _largest_graph(largest)
    unknown = {name: field for name, field in given.items() if name not in _COMPILER_KEYS}
    _none_left(
        "compilation_config", unknown, "mode", "cudagraph_mode", "cudagraph_capture_sizes", "max_cudagraph_capture_size"
    )
    return settings


def _graph_sizes(value: Any) -> dict[str, Any]:
    sizes = value if isinstance(value, list) else [value]
    return {"plugin": {"cuda": {"graph_sizes": sizes}}}


def _largest_graph(value: Any) -> dict[str, Any]:
    """The batch sizes for which the CUDA platform records graphs by default, up to the largest that is asked for."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ConfigError(f"max_cudagraph_capture_size must be a whole number of at least 0, got {quoted(value)}")
    if value == 0:
        return {"enforce_eager": True}
    steps = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512)
    return _graph_sizes([*(size for size in steps if size < value), value])


def _extension(value: Any) -> dict[str, Any]:
    """The name of a plugin; vLLM's dotted paths name classes that are mixed into a worker, of which frame has none."""
    if not value:
        return {}
    if isinstance(value, str) and ("." not in value or ":" in value):
        return {"worker_extension": value}
    raise ConfigError(
        f"worker_extension_cls={quoted(value)} cannot be honoured: it must be the name of a plugin; derive the class "
        "from frame.interfaces.WorkerExtension and offer it by the hook frame_worker_extensions"
    )


def _draft_model(value: Any) -> dict[str, Any]:
    if value in ("ngram", "[ngram]"):
        return {"speculator": "ngram"}
    raise ConfigError(
        f"spec_model={quoted(value)} cannot be honoured: there are no draft models yet; give --spec-method ngram"
    )


#: Arguments under another name here: name → the settings that it stands for.
TRANSLATIONS: Mapping[str, Callable[[Any], dict[str, Any]]] = MappingProxyType({
    "distributed_executor_backend": _executor,
    "kv_transfer_config": _transfer,
    "kv_offloading_size": _offloading_size,
    "kv_events_config": _kv_events,
    "attention_config": _attention,
    "speculative_config": _speculative,
    "eplb_config": _balance,
    "profiler_config": _profiler,
    "structured_outputs_config": _structured_outputs,
    "worker_extension_cls": _extension,
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
    "shutdown_timeout": lambda value: {"drain_seconds": value},
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

#: Translated arguments whose flag takes no value.
SWITCHES = frozenset(
    (
        "disable_uvicorn_access_log",
        "disable_fastapi_docs",
        "enable_log_requests",
        "enable_log_outputs",
        "disable_cascade_attn",
    )
)

#: Arguments whose flag takes several values.
LISTS = frozenset((
    "cudagraph_capture_sizes", "cuda_graph_sizes", "kv_cache_dtype_skip_layers", "lora_target_modules",
    "numa_bind_nodes", "numa_bind_cpus", "cpu_offload_params", "offload_params", "allowed_media_domains",
    "collect_detailed_traces", "ignore_patterns",
))  # fmt: skip

#: Settings to which several translations add, beside what the user gives for them.
_JOINED = ("metrics_sinks", "plugin")


def translate(values: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """`values` under frame's names, without the arguments that frame does not use. None always means the default.

    `defaults` are the defaults of frame's settings: a value that equals its default contradicts no translation. Raises
    `ConfigError` for an argument that would have to do something and cannot.
    """
    own: dict[str, Any] = {}
    joined: dict[str, Any] = {}
    meant: dict[str, str] = {}  # setting -> the translated argument that gave it
    ignored: list[str] = []
    for name, value in values.items():
        if value is None:
            continue
        if name in UNUSED:
            unused = UNUSED[name]
            if unused.harmless is not None and value not in unused.harmless:
                raise ConfigError(f"{name}={quoted(value)} cannot be honoured: {unused.reason}")
            if unused.harmless is None:
                ignored.append(name)
        elif name in TRANSLATIONS:
            for key, part in TRANSLATIONS[name](value).items():
                if key in _JOINED:
                    _check_given(name, key, part, values.get(key))
                    joined[key] = _join(joined.get(key), part)
                    continue
                if values.get(key) not in (None, defaults.get(key), part):
                    raise ConfigError(
                        f"{name} means {key}={quoted(part)}, but {key}={quoted(values[key])} is given too; "
                        "leave one out"
                    )
                if key in meant and own[key] != _own_value(key, part):
                    one, other = sorted((name, meant[key]))
                    raise ConfigError(f"{one} and {other} mean different values of {key}; leave one out")
                own[key], meant[key] = _own_value(key, part), name
        else:
            own[name] = _own_value(name, value)
    if ignored:
        logger.warning("arguments of vLLM's that have no effect here: %s", ", ".join(sorted(ignored)))
    return own | {key: _join(part, own.get(key)) for key, part in joined.items()}


def _check_given(name: str, path: str, meant: Any, given: Any) -> None:
    """Raises `ConfigError` where argument `name` means another value of an option than the one that is given for it."""
    if isinstance(meant, Mapping) and isinstance(given, Mapping):
        for key in meant.keys() & given.keys():
            _check_given(name, f"{path}.{key}", meant[key], given[key])
    elif not (given is None or isinstance(meant, Mapping | list) or _number(meant) == _number(given)):
        raise ConfigError(
            f"{name} means {path}={quoted(meant)}, but {path}={quoted(given)} is given too; leave one out"
        )


def _number(value: Any) -> Any:
    """What a text from the command line means as a value."""
    try:
        return float(value) if isinstance(value, str) else value
    except ValueError:
        return value


def _join(first: Any, second: Any) -> Any:
    """Two lists joined without duplicates, or two mappings merged, of which the second wins."""
    if not first or not second:
        return first or second
    if isinstance(first, list):
        return [*first, *(item for item in second if item not in first)]
    return merge(first, second)


def _own_value(name: str, value: Any) -> Any:
    return VALUES.get((name, value), value) if isinstance(value, str) else value
