"""No request waits for a compiler: whatever steps launch, the warm-up has met it."""

from __future__ import annotations

import os
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import pytest

pytest.importorskip("triton")

from frame.plugins.platforms.cuda.compile import rehearsal
from tests.plugins.platforms.served_steps import late_kernels

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1" or not rehearsal.can_rehearse(), reason="nothing is compiled"
)
DENSE: dict[str, Any] = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 2048, "intermediate_size": 6144,
    "num_hidden_layers": 2, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu",
    "tie_word_embeddings": True, "torch_dtype": "bfloat16", "attention_bias": False,
}  # fmt: skip
EXPERTS: dict[str, Any] = {
    **DENSE, "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "moe_intermediate_size": 768,
    "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}  # fmt: skip
SMALL: dict[str, Any] = {**DENSE, "hidden_size": 1024, "intermediate_size": 3072, "vocab_size": 4096}
LATENTS: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "hidden_size": 2048,
    "intermediate_size": 10944, "num_hidden_layers": 2, "num_attention_heads": 16, "vocab_size": 102400,
    "max_position_embeddings": 8192, "rms_norm_eps": 1e-6, "rope_theta": 1e4, "hidden_act": "silu",
    "torch_dtype": "bfloat16", "attention_bias": False, "q_lora_rank": None, "kv_lora_rank": 512,
    "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "n_routed_experts": 64, "n_shared_experts": 2,
    "num_experts_per_tok": 6, "moe_intermediate_size": 1408, "first_k_dense_replace": 1, "topk_method": "greedy",
    "norm_topk_prob": False, "routed_scaling_factor": 1.0, "tie_word_embeddings": False,
}  # fmt: skip
SPARSE: dict[str, Any] = {
    **LATENTS, "architectures": ["DeepseekV32ForCausalLM"], "model_type": "deepseek_v32", "q_lora_rank": 1536,
    "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "n_group": 1, "topk_group": 1,
    "topk_method": "noaux_tc", "norm_topk_prob": True,
}  # fmt: skip
STATES: dict[str, Any] = {
    "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 1024, "num_hidden_layers": 2,
    "num_heads": 32, "head_dim": 64, "state_size": 128, "n_groups": 1, "expand": 2, "conv_kernel": 4,
    "vocab_size": 4096, "tie_word_embeddings": True, "torch_dtype": "bfloat16", "use_conv_bias": True,
    "use_bias": False, "max_position_embeddings": 8192,
}  # fmt: skip
OSS: dict[str, Any] = {
    "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "hidden_size": 2880, "intermediate_size": 2880,
    "num_hidden_layers": 2, "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "vocab_size": 4096,
    "num_local_experts": 32, "num_experts_per_tok": 4, "sliding_window": 128, "swiglu_limit": 7.0,
    "layer_types": ["sliding_attention", "full_attention"], "rms_norm_eps": 1e-5, "rope_theta": 150000,
    "max_position_embeddings": 8192, "attention_bias": True, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"
        ],
    },
}  # fmt: skip
CASES = {
    "dense": (DENSE, {"max_model_len": 4096}),
    "dense, one request at a time": (DENSE, {"max_model_len": 2048, "max_num_seqs": 1}),
    "dense, four at a time": (DENSE, {"max_model_len": 4096, "max_num_seqs": 4, "max_num_batched_tokens": 2048}),
    "small weights, nothing captured": (
        SMALL,
        {"max_model_len": 2048, "max_num_batched_tokens": 2048, "enforce_eager": True},
    ),
    "small weights, 64 at a time": (
        SMALL,
        {"max_model_len": 2048, "max_num_seqs": 64, "max_num_batched_tokens": 2048, "enforce_eager": True},
    ),
    "many KV heads, 16 at a time": (
        {**SMALL, "num_attention_heads": 32, "num_key_value_heads": 32},
        {"max_model_len": 2048, "max_num_seqs": 16, "max_num_batched_tokens": 2048},
    ),
    "small weights, six at a time": (SMALL, {"max_model_len": 2048, "max_num_seqs": 6, "max_num_batched_tokens": 2048}),
    "small weights": (SMALL, {"max_model_len": 2048, "max_num_batched_tokens": 2048}),
    "small weights, one request at a time": (SMALL, {"max_model_len": 2048, "max_num_seqs": 1}),
    "small weights, calculated scales": (
        SMALL,
        {"max_model_len": 2048, "max_num_seqs": 4, "kv_cache_dtype": "fp8_e4m3", "calculate_kv_scales": True},
    ),
    "small weights, int4": (SMALL, {"max_model_len": 2048, "max_num_batched_tokens": 2048, "quantization": "int4"}),
    "small weights, fp8": (SMALL, {"max_model_len": 2048, "max_num_batched_tokens": 2048, "quantization": "fp8"}),
    "experts": (EXPERTS, {"max_model_len": 4096}),
    "experts of 4 bits": (OSS, {"max_model_len": 4096}),
    "latents": (LATENTS, {"max_model_len": 4096}),
    "states": (STATES, {"max_model_len": 4096}),
    "sparse latents": (SPARSE, {"max_model_len": 4096}),
}


@pytest.mark.parametrize(
    "name", [name if name == "dense" else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_steps_of_requests_launch_no_kernel_that_the_warm_up_has_not_met(name: str) -> None:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        met, late, imports_sympy = pool.submit(late_kernels, *CASES[name], seed=1).result()
    assert met > 25
    assert late == []
    assert not imports_sympy, "an operation of torch's meta device that absent_device should answer: seconds of a start"
