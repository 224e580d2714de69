"""The page of vLLM's arguments: what each is in frame, or why frame does not use it."""

from __future__ import annotations

from collections.abc import Mapping

from tables import table

from frame.vllm_names.arguments import TRANSLATIONS, VALUES
from frame.vllm_names.unused import UNUSED, Unused

#: What vLLM's arguments of another name are here.
_TRANSLATED: Mapping[str, str] = {
    "distributed_executor_backend": "`executor`: `uni` is `inline`, `mp` is `process`",
    "kv_transfer_config": "`kv_connector`, `kv_role`, `kv_ip`, `kv_load_failure_policy`; "
    "`kv_connector_extra_config` is `plugin.CONNECTOR`, and `kv_buffer_device` `cpu` is its `host_buffer`; "
    "`lmcache.mp.host` and `lmcache.mp.port` in it are `plugin.lmcache.server`; "
    "`engine_id` and `kv_buffer_size` have no effect, and of `kv_port`, `kv_parallel_size`, "
    "`enable_permute_local_kv` and "
    "`kv_connector_module_path` only the defaults are accepted",
    "kv_offloading_size": "`kv_connector=offload` with `plugin.offload.size`; 0: none",
    "kv_events_config": "`kv_events_endpoint` and the others of `kv_events_…`; without `endpoint` it is "
    "tcp://127.0.0.1:5557, `tcp://*` is refused, and a tcp address of a host is connected to, as in vLLM",
    "attention_config": "`attention_backend` (its key `backend`)",
    "eplb_config": "`eplb_window_size`, `eplb_step_interval`, `num_redundant_experts`, `eplb_log_balancedness`, "
    "`eplb_use_async`, `expert_balancer` (its key `policy`)",
    "speculative_config": "`speculator` (its key `method`), `num_speculative_tokens`, `disable_by_batch_size`; "
    "other keys are `plugin.METHOD`",
    "profiler_config": "`profile_dir` (its key `torch_profiler_dir`)",
    "structured_outputs_config": "`structured_outputs_backend` (its key `backend`), and its other keys by name",
    "worker_extension_cls": "`worker_extension`, the name of a plugin; dotted paths are refused",
    "guided_decoding_backend": "`structured_outputs_backend`",
    "pooler_config": "`pooling_type`, `normalize`, …: the settings under `pooler`; `logit_bias` is `pooler_logit_bias`",
    "task": "`runner` and `convert`: `embed` is `runner=pooling`, `convert=embed`",
    "device": "`platform`",
    "disable_uvicorn_access_log": "`disable_access_log`",
    "disable_fastapi_docs": "`openapi`, the opposite",
    "h11_max_incomplete_event_size": "`max_head_bytes`",
    "h11_max_header_count": "`max_headers`",
    "enable_log_requests": "`metrics_sinks` with `log`",
    "enable_log_outputs": "`plugin.log.outputs`",
    "max_log_len": "`plugin.log.max_chars`",
    "otlp_traces_endpoint": "`metrics_sinks` with `otel`, and `plugin.otel.endpoint`",
    "spec_method": "`speculator`",
    "spec_tokens": "`num_speculative_tokens`",
    "spec_model": "`speculator` where it is `ngram`; refused otherwise",
    "optimization_level": "0 is `enforce_eager`; 1 to 3 are the default here",
    "compilation_config": "`enforce_eager` (its `mode` or `cudagraph_mode`), `plugin.cuda.graph_sizes` (its "
    "`cudagraph_capture_sizes`, `max_cudagraph_capture_size`); keys of the compiler change nothing",
    "cudagraph_capture_sizes": "`plugin.cuda.graph_sizes`",
    "cuda_graph_sizes": "`plugin.cuda.graph_sizes`",
    "max_cudagraph_capture_size": "`plugin.cuda.graph_sizes`, the default ones up to it; 0 is `enforce_eager`",
    "disable_cascade_attn": "`shared_prefix_min_tokens=0`",
    "shutdown_timeout": "`drain_seconds`",
}


def page() -> str:
    """The page as Markdown."""
    renamed = [(f"`{name}`", _TRANSLATED[name]) for name in TRANSLATIONS]
    values = [(f"`{name}={value}`", f"`{name}={ours}`") for (name, value), ours in VALUES.items()]
    unused = [(f"`{name}`", _accepted(one), one.reason) for name, one in sorted(UNUSED.items())]
    return "\n\n".join(
        (
            "# vLLM's arguments",
            "As flags of `frame serve` and as keywords of `LLM`, `EngineArgs` and `AsyncEngineArgs`. Names that are "
            "not here and not among the [settings](configuration.md) are errors that name the near ones.",
            "## Other names",
            table(("vLLM's name", "here"), renamed),
            "## Other values",
            table(("vLLM's value", "here"), values),
            "## Without a part to act on",
            "Accepted with the values in the second column; any other value is refused with the reason. `any` values "
            "are accepted, and a warning says that they have no effect.",
            table(("argument", "accepted", "reason"), unused),
        )
    )


def _accepted(one: Unused) -> str:
    if one.harmless is None:
        return "any"
    return ", ".join(f"`{value!r}`" for value in one.harmless)
