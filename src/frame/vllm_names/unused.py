"""vLLM's arguments that frame does not use: which of their values are accepted, and what to give instead of others.

Every argument of `vllm serve` (0.22) that is neither a setting of frame's nor translated is here. A value that would
change an answer, a limit or what is measured is refused with the reason; one that only tunes vLLM's own parts is
accepted with one warning that names the argument.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Unused:
    """An argument of vLLM's that frame does not use.

    `harmless` are the values that are accepted, None: every value is, with a warning; `switch`: its flag takes no
    value; `short`: another spelling of its flag.
    """

    reason: str
    harmless: tuple[Any, ...] | None = None
    switch: bool = False
    short: str = ""


_NO_EFFECT = "it has no effect here"
_MEDIA = "models take text only"
_NO_RANKS = "engines divide a model by tensors, layers and experts so far"
_NO_EXPERT_PARALLEL = "devices read all weights of their experts, and answers do not name the experts of a token"
_WHOLE_LAYERS = "whole layers are kept in host memory: give --cpu-offload-gb"
_NO_CODE = "no code of a checkpoint is ever run"
_CHOSEN_BY_SHAPE = "kernels are chosen by shape and device; give --attention-backend or --plugin.cuda.FIELD"
_NO_MEASURE = "this is not measured; /metrics and `frame bench` list what is measured"


def _switches(reason: str, names: str) -> dict[str, Unused]:
    """Switches that are refused when they are on."""
    return {name: Unused(reason, (None, False), switch=True) for name in names.split()}


def _free(names: str, *, switch: bool = False) -> dict[str, Unused]:
    """Arguments that tune parts of vLLM which frame does not have: every value is accepted and has no effect."""
    return {name: Unused(_NO_EFFECT, switch=switch) for name in names.split()}


def _only(reason: str, **harmless: Any) -> dict[str, Unused]:
    """Arguments that may only have the given value, or one of a tuple of values, because those change nothing."""
    return {
        name: Unused(reason, (None, *(value if isinstance(value, tuple) else (value,))))
        for name, value in harmless.items()
    }


_RANKS = {
    **_only(
        _NO_RANKS,
        ubatch_size=0,
    ),
    **_switches(
        _NO_RANKS,
        "data_parallel_multi_port_external_lb",
    ),
    **_switches("two halves of a batch by turns made steps slower at every size that was measured", "enable_dbo"),
    # addresses, ports and limits of groups of ranks, of which there are none
    **_free(
        "data_parallel_backend data_parallel_supervisor_port "
        "dp_supervisor_probe_interval_s dp_supervisor_probe_timeout_s dp_supervisor_probe_failure_threshold "
        "distributed_timeout_seconds cpu_distributed_timeout_seconds dcp_comm_backend "
        "dcp_kv_cache_interleave_size cp_kv_cache_interleave_size dbo_decode_token_threshold "
        "dbo_prefill_token_threshold max_parallel_loading_workers"
    ),
    **_free("disable_nccl_for_dp_synchronization disable_custom_all_reduce", switch=True),
    **_switches("Ray is not supported yet", "ray_workers_use_nsight"),
    **_switches("start frame under numactl instead", "numa_bind"),
    **_only("start frame under numactl instead", numa_bind_nodes=(), numa_bind_cpus=()),
    "worker_cls": Unused("give --platform or --executor, names of plugins", (None, "auto")),
}  # fmt: skip

_EXPERTS = {
    **_switches(_NO_EXPERT_PARALLEL, "enable_ep_weight_filter enable_return_routed_experts"),
    **_free("expert_placement_strategy all2all_backend"),
    **_free("enable_elastic_ep", switch=True),  # the number of engines may always change
}

_WEIGHTS = {
    **_only("the checkpoint's config.json says how it is quantised", quantization_config={}),
    **_only("the scales of the KV cache are read from the checkpoint", quantization_param_path=""),
    **_free("allow_deprecated_quantization", switch=True),
    **_only(_WHOLE_LAYERS, cpu_offload_params=([], ""), offload_group_size=0, offload_params=""),
    **_free("offload_backend offload_num_in_group offload_prefetch_step"),
    **_only("weights are replaced over the admin routes", weight_transfer_config={}),
    **_only("give --plugin.LOADER.FIELD instead", model_loader_extra_config={}),
    **_free("ignore_patterns pt_load_map_location safetensors_prefetch_num_threads safetensors_prefetch_block_size"),
}

_MODEL = {
    **_only(_NO_CODE, code_revision=""),
    **_switches(_NO_CODE, "trust_remote_code"),
    **_only("only Hugging Face folders are read", config_format=("auto", "hf")),
    **_only("the configuration is read from the model's folder", hf_config_path=""),
    **_only("set the variable HF_TOKEN", hf_token=""),
    **_only("give --tokenizer, a folder", tokenizer_revision=""),
    **_only("give --dtype, which attention has too", override_attention_dtype=""),
    **_only('give hf_overrides={"rope_parameters": …} instead', rope_scaling={}, rope_theta=()),
    **_only("give --logits-processors", logits_processor_pattern="", io_processor_plugin=""),
    **_switches("give --max-model-len instead", "disable_sliding_window"),
    **_switches("noise is drawn in 32 bits on every platform, so that draws are equal", "use_fp64_gumbel"),
    **_only("the budget of reasoning is not bounded", reasoning_config={}),
    **_only("windows of convolutions have the model's type: give --mamba-ssm-cache-dtype", mamba_cache_dtype="auto"),
    **_only("states are kept where blocks end, unless prefix caching is off", mamba_cache_mode="none"),
    **_switches("states are rounded to the nearest number", "enable_mamba_cache_stochastic_rounding"),
    **_free("mamba_backend mamba_block_size mamba_cache_philox_rounds gdn_prefill_backend"),
}

_MEDIA_ARGUMENTS = {
    **_only(
        _MEDIA, allowed_local_media_path="", allowed_media_domains=([],), limit_mm_per_prompt={},
        mm_processor_kwargs={}, media_io_kwargs={}, default_mm_loras={}, ec_transfer_config={},
        video_pruning_rate=(0, 0.0),
    ),
    **_switches(_MEDIA, "enable_mm_embeds interleave_mm_strings mm_encoder_only"),
    **_free(
        "mm_processor_cache_gb mm_processor_cache_type mm_shm_cache_max_object_size_mb mm_encoder_tp_mode "
        "mm_encoder_attn_backend mm_encoder_attn_dtype mm_encoder_fp8_scale_path mm_encoder_fp8_scale_save_path "
        "mm_encoder_fp8_scale_save_margin mm_tensor_ipc"
    ),
    **_free(
        "language_model_only skip_mm_profiling disable_chunked_mm_input disable_mm_preprocessor_cache "
        "enable_flash_late_interaction",
        switch=True,
    ),
}  # fmt: skip

_ADAPTERS = {
    **_switches("encoders of media take no adapters", "enable_tower_connector_lora"),
    **_free("lora_dtype lora_target_modules"),
    **_free("specialize_active_lora enable_mixed_moe_lora_format", switch=True),
}

_CACHE = {
    **_only("every layer has the same type of cache", kv_cache_dtype_skip_layers=([],)),
    **_switches("layers of each kind have their own blocks", "disable_hybrid_kv_cache_manager"),
    **_switches("layers that share keys are not supported yet", "kv_sharing_fast_prefill"),
    **_only("blocks are kept by frame itself; there is: native", kv_offloading_backend="native"),
    **_free("swap_space"),
    **_switches("a CPU engine sleeps without it, a CUDA engine not yet", "enable_sleep_mode"),
    **_free("enable_cumem_allocator", switch=True),
}

_SCHEDULER = {
    **_only("give --scheduling-policy, the name of a plugin", scheduler_cls=""),
    **_free("scheduler_reserve_full_isl", switch=True),
    **_free("preemption_mode num_lookahead_slots max_num_on_the_fly"),
}

_KERNELS = {
    **_only(_CHOSEN_BY_SHAPE, moe_backend="auto", linear_backend="auto", kernel_config={}, ir_op_priority={}),
    **_only("the defaults serve both; give --max-num-seqs and --max-num-batched-tokens", performance_mode="balanced"),
    **_free("max_seq_len_to_capture"),
    **_free("enable_flashinfer_autotune", switch=True),
    **_only("platforms take settings through plugin options", additional_config={}),
}

_OBSERVABILITY = {
    **_only("traces have queue, prefill and decode; give --metrics-sinks otel", collect_detailed_traces=([],)),
    **_switches(
        _NO_MEASURE,
        "kv_cache_metrics cudagraph_metrics enable_mfu_metrics enable_layerwise_nvtx_tracing "
        "enable_logging_iteration_details enable_mm_processor_stats",
    ),
    **_free("kv_cache_metrics_sample show_hidden_metrics_for_version"),
    **_free(
        "aggregate_engine_logging enable_server_load_tracking log_error_stack disable_log_requests enable_log_deltas",
        switch=True,
    ),
    **_only("give --log-level", log_config_file=""),
}

_SERVER = {
    **_switches("requests come over HTTP only", "grpc"),
    **_switches("the page and /openapi.json need nothing from elsewhere", "enable_offline_docs"),
    **_only("requests give chat_template_kwargs", default_chat_template_kwargs={}),
    **_only("give --disable-access-log, which covers every route", disable_access_log_for_endpoints=""),
    **_only("system_fingerprint names version and settings", fingerprint_mode=("full", "hash"), fingerprint_value=""),
    **_only("put a proxy before the server that limits ciphers", ssl_ciphers=""),
    **_only("one process reads chats for each API process; give --api-server-count", renderer_num_workers=1),
    **_switches("variables of vLLM that are set are named when the server starts", "fail_on_environ_validation"),
    **_free("disable_frontend_multiprocessing", switch=True),
}

#: Argument → why frame does not use it, and which of its values change nothing.
UNUSED: Mapping[str, Unused] = MappingProxyType(dict(sorted({
    **_RANKS, **_EXPERTS, **_WEIGHTS, **_MODEL, **_MEDIA_ARGUMENTS, **_ADAPTERS, **_CACHE, **_SCHEDULER, **_KERNELS,
    **_OBSERVABILITY, **_SERVER,
}.items())))  # fmt: skip
