"""Rows of decoders with routed experts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .dense import GEMMA4
from .row import TINY, Family

_MIXTRAL: Mapping[str, Any] = {**TINY, "num_local_experts": 6, "num_experts_per_tok": 2, "sliding_window": 24}
_NO_HEAD_DIM: Mapping[str, Any] = {name: value for name, value in TINY.items() if name != "head_dim"}
_SIX: Mapping[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2}
_QWEN2: Mapping[str, Any] = {
    **_NO_HEAD_DIM,
    **_SIX,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}

_GRANITE: Mapping[str, Any] = {
    **_NO_HEAD_DIM,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.6,
    "logits_scaling": 2.0,
}
_V3: Mapping[str, Any] = {
    **TINY,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 48,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_GPT_OSS: Mapping[str, Any] = {
    **TINY,
    "num_local_experts": 6,
    "num_experts_per_tok": 2,
    "sliding_window": 24,
    "swiglu_limit": 1.5,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 8.0,
        "beta_slow": 1.5,
        "truncate": False,
    },
}
_ERNIE: Mapping[str, Any] = {**TINY, "moe_num_experts": 6, "moe_k": 2, "moe_intermediate_size": 48}
_AFMOE: Mapping[str, Any] = {
    **TINY,
    **_SIX,
    "num_hidden_layers": 4,
    "moe_intermediate_size": 48,
    "route_scale": 1.5,
    "sliding_window": 24,
    "global_attn_every_n_layers": 2,
}

_LLAMA4: Mapping[str, Any] = {
    **TINY,
    "num_hidden_layers": 4,
    "intermediate_size_mlp": 80,
    "num_local_experts": 4,
    "num_experts_per_tok": 1,
    "moe_layers": [1, 3],
    "no_rope_layer_interval": 2,
    "attention_chunk_size": 16,
    "floor_scale": 8,
    "attn_scale": 0.4,
    "use_qk_norm": True,
}

_DBRX: Mapping[str, Any] = {
    **{name: TINY[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "d_model": 64,
    "n_heads": 4,
    "n_layers": 3,
    "max_seq_len": 256,
}

_GEMMA4: Mapping[str, Any] = {
    **GEMMA4,
    "num_hidden_layers": 4,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 2,
    "moe_intermediate_size": 48,
}

#: One line a family, more where values of its configuration turn a trait off that the first has on.
ROWS: Mapping[str, Family] = {
    "mixtral": Family("MixtralForCausalLM", "mixtral", _MIXTRAL),
    "qwen2-moe": Family("Qwen2MoeForCausalLM", "qwen2_moe", {**_QWEN2, "mlp_only_layers": [1]}),
    "qwen2-moe-renormalized": Family(
        "Qwen2MoeForCausalLM",
        "qwen2_moe",
        {
            **_QWEN2,
            "qkv_bias": False,
            "norm_topk_prob": True,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
        },
        in_matrix=True,
    ),
    "olmoe": Family("OlmoeForCausalLM", "olmoe", {**_NO_HEAD_DIM, **_SIX, "clip_qkv": 0.8}, in_matrix=True),
    "olmoe-renormalized": Family(
        "OlmoeForCausalLM",
        "olmoe",
        {**_NO_HEAD_DIM, **_SIX, "norm_topk_prob": True, "attention_bias": True},
        in_matrix=True,
    ),
    "flex-olmo": Family("FlexOlmoForCausalLM", "flex_olmo", {**TINY, **_SIX, "attention_bias": True}, in_matrix=True),
    "flex-olmo-renormalized": Family(
        "FlexOlmoForCausalLM", "flex_olmo", {**TINY, **_SIX, "norm_topk_prob": True}, in_matrix=True
    ),
    "phimoe": Family(
        "PhimoeForCausalLM",
        "phimoe",
        {
            **_NO_HEAD_DIM,
            "num_local_experts": 6,
            "router_jitter_noise": 0.4,
            "attention_bias": True,
            "lm_head_bias": True,
            "sliding_window": 24,
        },
    ),
    "phimoe-longrope": Family(
        "PhimoeForCausalLM",
        "phimoe",
        {
            **_NO_HEAD_DIM,
            "num_local_experts": 6,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                "original_max_position_embeddings": 256,
                "short_factor": [1.0 + i / 16 for i in range(8)],
                "long_factor": [2.0 + i for i in range(8)],
                "short_mscale": 1.2,
                "long_mscale": 1.3,
            },
        },
        in_matrix=True,
    ),
    "granite-moe": Family("GraniteMoeForCausalLM", "granitemoe", {**_GRANITE, "attention_bias": True}, in_matrix=True),
    "granite-moe-shared": Family(
        "GraniteMoeSharedForCausalLM", "granitemoeshared", {**_GRANITE, "shared_intermediate_size": 48}
    ),
    "granite-moe-unscaled": Family(
        "GraniteMoeSharedForCausalLM",
        "granitemoeshared",
        {
            **_NO_HEAD_DIM,
            "num_local_experts": 6,
            "attention_multiplier": 0.25,
            "shared_intermediate_size": 0,
            "tie_word_embeddings": True,
        },
        in_matrix=True,
    ),
    "glm4-moe": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {
            **_V3,
            "n_shared_experts": 2,
            "n_group": 4,
            "topk_group": 2,
            "routed_scaling_factor": 1.7,
            "use_qk_norm": True,
            "attention_bias": True,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        },
    ),
    "glm4-moe-plain": Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        {**_V3, "norm_topk_prob": False, "first_k_dense_replace": 0},
        in_matrix=True,
    ),
    "solar-open": Family(
        "SolarOpenForCausalLM",
        "solar_open",
        {
            **{
                name: value for name, value in _V3.items() if name not in ("first_k_dense_replace", "intermediate_size")
            },
            "attention_bias": True,
        },
        in_matrix=True,
    ),
    "dots1": Family(
        "Dots1ForCausalLM",
        "dots1",
        {
            **_V3,
            "n_shared_experts": 2,
            "norm_topk_prob": True,
            "routed_scaling_factor": 2.5,
            "sliding_window": 24,
            "max_window_layers": 1,
            "attention_bias": True,
        },
        in_matrix=True,
    ),
    "gpt-oss": Family("GptOssForCausalLM", "gpt_oss", _GPT_OSS),
    "gpt-oss-full": Family(
        "GptOssForCausalLM",
        "gpt_oss",
        {
            **_GPT_OSS,
            "attention_bias": False,
            "layer_types": ["full_attention"] * 3,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        },
        in_matrix=True,
    ),
    "minimax-m2": Family(
        "MiniMaxM2ForCausalLM",
        "minimax_m2",
        {**TINY, "num_local_experts": 6, "num_experts_per_tok": 2, "rotary_dim": 8},
        in_matrix=True,
    ),
    "ernie4.5-moe": Family(
        "Ernie4_5_MoeForCausalLM", "ernie4_5_moe", {**_ERNIE, "use_bias": True, "moe_norm_min": 0.6}, in_matrix=True
    ),
    "ernie4.5-moe-last": Family(
        "Ernie4_5_MoeForCausalLM",
        "ernie4_5_moe",
        {
            **_ERNIE,
            "num_hidden_layers": 5,
            "moe_layer_start_index": 0,
            "moe_layer_end_index": 2,
            "moe_layer_interval": 2,
            "moe_num_shared_experts": 0,
            "tie_word_embeddings": False,
        },
        in_matrix=True,
    ),
    "hunyuan-moe": Family(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        {
            **TINY,
            "num_experts": 6,
            "moe_topk": [2, 1, 3],
            "attention_bias": True,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 100.0, "factor": 1.0},
        },
        in_matrix=True,
    ),
    "hunyuan-moe-plain": Family(
        "HunYuanMoEV1ForCausalLM",
        "hunyuan_v1_moe",
        {**TINY, "num_experts": 6, "moe_topk": 2, "tie_word_embeddings": True},
        in_matrix=True,
    ),
    "hy3": Family(
        "HYV3ForCausalLM",
        "hy_v3",
        {**TINY, **_SIX, "moe_intermediate_size": 48, "num_shared_experts": 2},
        in_matrix=True,
    ),
    "afmoe": Family("AfmoeForCausalLM", "afmoe", {**_AFMOE, "mup_enabled": True, "attention_bias": True}),
    "afmoe-plain": Family(
        "AfmoeForCausalLM", "afmoe", {**_AFMOE, "num_dense_layers": 0, "num_shared_experts": 1}, in_matrix=True
    ),
    "exaone-moe": Family(
        "ExaoneMoeForCausalLM",
        "exaone_moe",
        {
            **TINY,
            **_SIX,
            "num_hidden_layers": 4,
            "moe_intermediate_size": 48,
            "num_shared_experts": 2,
            "sliding_window": 24,
            "sliding_window_pattern": 4,
        },
        in_matrix=True,
    ),
    "mellum": Family(
        "MellumForCausalLM",
        "mellum",
        {
            **TINY,
            **_SIX,
            "moe_intermediate_size": 48,
            "sliding_window": 24,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "mlp_layer_types": ["sparse", "dense", "sparse"],
        },
        in_matrix=True,
    ),
    "llama4": Family(
        "Llama4ForCausalLM",
        "llama4_text",
        {
            **_LLAMA4,
            "attention_bias": True,
            "no_rope_layers": [1, 1, 0, 1],
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 10000.0,
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            },
        },
    ),
    "llama4-plain": Family(
        "Llama4ForCausalLM",
        "llama4_text",
        {**_LLAMA4, "use_qk_norm": False, "attn_temperature_tuning": False, "moe_layers": [0, 1, 2, 3]},
        in_matrix=True,
    ),
    "mimo-v2": Family(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        {
            **TINY,
            "num_key_value_heads": 1,
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "sliding_window": 24,
            "attention_bias": True,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        },
    ),
    "mimo-v2-unscaled": Family(
        "MiMoV2FlashForCausalLM",
        "mimo_v2_flash",
        {
            **TINY,
            "head_dim": 24,
            "v_head_dim": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "attention_value_scale": None,
            "layer_types": ["full_attention"] * 3,
            "mlp_layer_types": ["sparse"] * 3,
        },
        in_matrix=True,
    ),
    "dbrx": Family(
        "DbrxForCausalLM",
        "dbrx",
        {
            **_DBRX,
            "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 10000.0},
            "ffn_config": {"ffn_hidden_size": 96, "moe_num_experts": 6, "moe_top_k": 2},
        },
        in_matrix=True,
    ),
    "dbrx-plain": Family(
        "DbrxForCausalLM",
        "dbrx",
        {
            **_DBRX,
            "attn_config": {"kv_n_heads": 4, "clip_qkv": 50.0, "rope_theta": 10000.0},
            "ffn_config": {
                "ffn_hidden_size": 96,
                "ffn_act_fn": {"name": "gelu"},
                "moe_num_experts": 6,
                "moe_top_k": 2,
                "moe_normalize_expert_weights": None,
            },
        },
        in_matrix=True,
    ),
    "gemma4-moe": Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {**_GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 0.5},
        embedding_scale=0.05,
        router_scale=16.0,
    ),
    "gemma4-moe-shared": Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {
            **_GEMMA4,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "top_k_experts": 3,
            "hidden_activation": "silu",
            "tie_word_embeddings": False,
        },
        embedding_scale=0.05,
        router_scale=16.0,
        in_matrix=True,
    ),
}
