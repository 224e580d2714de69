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
}
