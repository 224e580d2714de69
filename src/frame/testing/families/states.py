"""Rows of models whose layers keep a running state of each request: Mamba, and hybrids with attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .row import TINY, Family

_PURE: Mapping[str, Any] = {
    **{name: TINY[name] for name in ("vocab_size", "hidden_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "num_hidden_layers": 3,
}
_MAMBA2: Mapping[str, Any] = {
    **_PURE,
    "num_heads": 8,
    "head_dim": 16,
    "state_size": 12,
    "n_groups": 2,
    "chunk_size": 16,
}

_MAMBA: Mapping[str, Any] = {**_PURE, "state_size": 6, "time_step_rank": 5}
_DELTA: Mapping[str, Any] = {
    **TINY,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
}
_SPARSE: Mapping[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 4,
    "moe_intermediate_size": 48,
    "shared_expert_intermediate_size": 32,
}
_LFM2: Mapping[str, Any] = {
    **{name: value for name, value in TINY.items() if name != "head_dim"},
    "layer_types": ["conv", "full_attention", "conv"],
    "norm_eps": 1e-3,
}
_BAMBA: Mapping[str, Any] = {
    **{name: value for name, value in TINY.items() if name != "head_dim"},
    "mamba_n_heads": 8,
    "mamba_d_state": 12,
    "mamba_n_groups": 2,
}
_ZAMBA2: Mapping[str, Any] = {
    **{name: value for name, value in TINY.items() if name != "head_dim"},
    "num_key_value_heads": 4,
    "layers_block_type": ["hybrid", "hybrid", "hybrid"],
    "mamba_d_state": 12,
    "mamba_ngroups": 2,
    "n_mamba_heads": 8,
    "adapter_rank": 8,
    "chunk_size": 16,
}
#: transformers writes the convolution of queries, keys and values in three equal parts.
_OLMO: Mapping[str, Any] = {
    **{name: value for name, value in TINY.items() if name != "head_dim"},
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 12,
}

ROWS: Mapping[str, Family] = {
    "mamba": Family("MambaForCausalLM", "mamba", {**_MAMBA, "use_bias": True}, states="all"),
    "mamba-untied": Family(
        "MambaForCausalLM",
        "mamba",
        {**_MAMBA, "use_conv_bias": False, "tie_word_embeddings": False, "conv_kernel": 3},
        in_matrix=True,
        states="all",
    ),
    "falcon-mamba": Family(
        "FalconMambaForCausalLM", "falcon_mamba", {**_MAMBA, "mixer_rms_eps": 0.01}, in_matrix=True, states="all"
    ),
    "mamba2": Family(
        "Mamba2ForCausalLM",
        "mamba2",
        {**_MAMBA2, "time_step_limit": [0.3, 1.0], "use_bias": True},
        states="all",
    ),
    "mamba2-tied": Family(
        "Mamba2ForCausalLM",
        "mamba2",
        {**_MAMBA2, "n_groups": 1, "use_conv_bias": False, "tie_word_embeddings": True},
        in_matrix=True,
        states="all",
    ),
    "qwen3-next": Family(
        "Qwen3NextForCausalLM", "qwen3_next", {**_DELTA, **_SPARSE, "mlp_only_layers": [1]}, states="some"
    ),
    "qwen3-next-biases": Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {
            **_DELTA,
            **_SPARSE,
            "attention_bias": True,
            "norm_topk_prob": False,
            "linear_num_key_heads": 4,
            "decoder_sparse_step": 2,
            "layer_types": ["full_attention", "linear_attention"] * 2,
        },
        in_matrix=True,
        states="some",
    ),
    "qwen3-5": Family("Qwen3_5ForCausalLM", "qwen3_5_text", _DELTA, states="some"),
    "qwen3-5-moe": Family(
        "Qwen3_5MoeForCausalLM", "qwen3_5_moe_text", {**_DELTA, **_SPARSE}, in_matrix=True, states="some"
    ),
    "lfm2": Family("Lfm2ForCausalLM", "lfm2", {**_LFM2, "conv_bias": True, "block_multiple_of": 16}, states="some"),
    "lfm2-plain": Family(
        "Lfm2ForCausalLM",
        "lfm2",
        {**_LFM2, "block_auto_adjust_ff_dim": False, "tie_word_embeddings": False, "conv_L_cache": 4},
        in_matrix=True,
        states="some",
    ),
    "lfm2-moe": Family(
        "Lfm2MoeForCausalLM",
        "lfm2_moe",
        {
            **_LFM2,
            "num_dense_layers": 1,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "routed_scaling_factor": 1.5,
        },
        in_matrix=True,
        states="some",
    ),
    "bamba": Family(
        "BambaForCausalLM",
        "bamba",
        {**_BAMBA, "attn_layer_indices": [1], "mamba_proj_bias": True, "attention_bias": True, "mlp_bias": True},
        in_matrix=True,
        states="some",
    ),
    "granite-hybrid": Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **_BAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 32,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.4,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
        states="some",
    ),
    "granite-hybrid-rope": Family(
        "GraniteMoeHybridForCausalLM",
        "granitemoehybrid",
        {
            **_BAMBA,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "shared_intermediate_size": 96,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_conv_bias": False,
            "tie_word_embeddings": True,
        },
        in_matrix=True,
        states="some",
    ),
    "nemotron-h": Family(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            **TINY,
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "linear_attention"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "ssm_state_size": 12,
            "n_groups": 2,
            "chunk_size": 16,
            "use_bias": True,
            "mlp_bias": True,
            "time_step_min": 0.3,
        },
        states="some",
    ),
    "nemotron-h-experts": Family(
        "NemotronHForCausalLM",
        "nemotron_h",
        {
            **TINY,
            "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
            "mamba_num_heads": 8,
            "mamba_head_dim": 12,
            "ssm_state_size": 12,
            "n_groups": 2,
            "chunk_size": 16,
            "n_routed_experts": 8,
            "num_experts_per_tok": 3,
            "moe_intermediate_size": 48,
            "moe_shared_expert_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "n_group": 2,
        },
        in_matrix=True,
        states="some",
    ),
    "falcon-h1": Family(
        "FalconH1ForCausalLM",
        "falcon_h1",
        {
            **_BAMBA,
            "mamba_d_ssm": 96,
            "mamba_rms_norm": True,
            "projectors_bias": True,
            "lm_head_multiplier": 0.5,
            "embedding_multiplier": 3.0,
            "mlp_multipliers": [1.5, 0.5],
            "key_multiplier": 0.4,
            "attention_out_multiplier": 0.7,
            "attention_in_multiplier": 1.3,
            "ssm_multipliers": [1.2, 0.8, 1.1, 0.9, 0.7],
            "ssm_in_multiplier": 1.4,
            "ssm_out_multiplier": 0.6,
        },
        states="some",
    ),
    "falcon-h1-gate": Family(
        "FalconH1ForCausalLM",
        "falcon_h1",
        {**_BAMBA, "mamba_d_ssm": None, "attention_bias": True, "mlp_bias": True, "mamba_proj_bias": True},
        in_matrix=True,
        states="some",
    ),
    "falcon-h1-gate-first": Family(
        "FalconH1ForCausalLM",
        "falcon_h1",
        {**_BAMBA, "mamba_d_ssm": 64, "mamba_rms_norm": True, "mamba_norm_before_gate": False},
        in_matrix=True,
        states="some",
    ),
    "jamba": Family(
        "JambaForCausalLM",
        "jamba",
        {
            **{name: value for name, value in TINY.items() if name != "head_dim"},
            "num_hidden_layers": 4,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "attn_layer_period": 3,
            "attn_layer_offset": 1,
            "mamba_d_state": 6,
            "mamba_proj_bias": True,
        },
        states="some",
    ),
    "zamba2": Family(
        "Zamba2ForCausalLM",
        "zamba2",
        {
            **_ZAMBA2,
            "num_mem_blocks": 2,
            "use_shared_attention_adapter": True,
            "adapter_rank": 5,
            "use_mem_rope": True,
            "add_bias_linear": True,
            "time_step_min": 0.3,
        },
        states="some",
    ),
    "zamba2-one-block": Family(
        "Zamba2ForCausalLM",
        "zamba2",
        {**_ZAMBA2, "num_hidden_layers": 4, "layers_block_type": ["linear_attention", *["hybrid"] * 3]},
        in_matrix=True,
        states="some",
    ),
    "minimax": Family(
        "MiniMaxForCausalLM",
        "minimax",
        {
            **TINY,
            "block_size": 16,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "full_attn_alpha_factor": 1.3,
            "full_attn_beta_factor": 0.8,
            "linear_attn_alpha_factor": 1.2,
            "linear_attn_beta_factor": 0.9,
            "mlp_alpha_factor": 1.1,
            "mlp_beta_factor": 0.7,
        },
        states="some",
    ),
    "olmo-hybrid": Family(
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        {**_OLMO, "linear_allow_neg_eigval": True, "linear_num_value_heads": 8, "linear_value_head_dim": 6},
        in_matrix=True,
        states="some",
    ),
    "olmo-hybrid-rope": Family(
        "OlmoHybridForCausalLM",
        "olmo_hybrid",
        {
            **_OLMO,
            "linear_allow_neg_eigval": False,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
            "attention_bias": True,
        },
        in_matrix=True,
        states="some",
    ),
    "kimi-linear": Family(
        "KimiLinearForCausalLM",
        "kimi_linear",
        {
            **{name: value for name, value in TINY.items() if name not in ("head_dim", "num_key_value_heads")},
            "num_key_value_heads": 4,
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "linear_num_heads": 4,
            "linear_head_dim": 12,
            "kv_lora_rank": 24,
            "qk_nope_head_dim": 16,
            "qk_rope_head_dim": 8,
            "v_head_dim": 12,
            "num_local_experts": 8,
            "num_experts_per_tok": 3,
            "n_group": 2,
            "topk_group": 1,
            "n_shared_experts": 1,
            "moe_intermediate_size": 48,
        },
        states="some",
    ),
}
