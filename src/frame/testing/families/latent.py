"""Rows of families with multi-head latent attention."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .row import TINY, Family

#: Ranks, and sizes of a head's parts, with which short prompts are attended absorbed and long ones expanded. Norms of
#: latents have another epsilon than the others, which shows at this size.
_LATENT: Mapping[str, Any] = {
    **{name: value for name, value in TINY.items() if name != "head_dim"},
    "num_key_value_heads": TINY["num_attention_heads"],
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 12,
    "rms_norm_eps": 1e-2,
}
_EXPERTS: Mapping[str, Any] = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}
_GROUPS: Mapping[str, Any] = {"n_group": 4, "topk_group": 2}
_YARN: Mapping[str, Any] = {
    "rope_theta": 10000.0,
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
}
_V2: Mapping[str, Any] = {**_LATENT, **_EXPERTS}
_V3: Mapping[str, Any] = {**_LATENT, **_EXPERTS, **_GROUPS, "norm_topk_prob": True}
#: Fewer tokens than the tests' prompts have, and heads enough that few scores are equal.
_INDEX: Mapping[str, Any] = {"index_topk": 16, "index_head_dim": 16, "index_n_heads": 8}

#: One line a family.
ROWS: Mapping[str, Family] = {
    "deepseek-v2": Family(
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            **_V2,
            **_GROUPS,
            "topk_method": "group_limited_greedy",
            "attention_bias": True,
            "rope_parameters": {**_YARN, "mscale": 0.7, "mscale_all_dim": 0.9},
        },
    ),
    "deepseek-v2-lite": Family("DeepseekV2ForCausalLM", "deepseek_v2", {**_V2, "q_lora_rank": None}, in_matrix=True),
    "deepseek-v3": Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {**_V3, "rope_parameters": {**_YARN, "mscale": 1.0, "mscale_all_dim": 1.0}},
    ),
    "deepseek-v3-halves": Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {**_V3, "rope_interleave": False, "norm_topk_prob": False, "attention_bias": True, "q_lora_rank": None},
        in_matrix=True,
    ),
    "glm4-moe-lite": Family(
        "Glm4MoeLiteForCausalLM",
        "glm4_moe_lite",
        {**_V3, "mlp_layer_types": ["sparse", "dense", "sparse"], "n_shared_experts": 1, "n_group": 1, "topk_group": 1},
        in_matrix=True,
    ),
    "minicpm3": Family(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        {
            **_LATENT,
            "scale_emb": 3,
            "scale_depth": 1.4,
            "dim_model_base": 16,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "rope_theta": 10000.0,
                "rope_type": "longrope",
                "factor": 2.0,
                "original_max_position_embeddings": 256,
                "short_factor": [1.0 + i / 8 for i in range(4)],
                "long_factor": [2.0 + i for i in range(4)],
            },
        },
        embedding_scale=0.3,
    ),
    "minicpm3-plain": Family(
        "MiniCPM3ForCausalLM",
        "minicpm3",
        {**_LATENT, "q_lora_rank": None, "scale_emb": 1, "scale_depth": None, "dim_model_base": None},
        in_matrix=True,
    ),
    "longcat-flash": Family(
        "LongcatFlashForCausalLM",
        "longcat_flash",
        {
            **{
                name: value for name, value in _LATENT.items() if name not in ("num_hidden_layers", "intermediate_size")
            },
            "num_layers": 2,
            "ffn_hidden_size": 96,
            "expert_ffn_hidden_size": 24,
            "n_routed_experts": 8,
            "zero_expert_num": 4,
            "moe_topk": 3,
            "routed_scaling_factor": 3.0,
            "head_dim": 8,
        },
    ),
    "deepseek-v32": Family("DeepseekV32ForCausalLM", "deepseek_v32", {**_V3, **_INDEX}),
    "glm-moe-dsa": Family(
        "GlmMoeDsaForCausalLM",
        "glm_moe_dsa",
        {**_V3, **_INDEX, "n_group": 1, "topk_group": 1, "indexer_types": ["full", "shared", "full"]},
        in_matrix=True,
    ),
    "youtu": Family("YoutuForCausalLM", "youtu", {**_LATENT, "tie_word_embeddings": True}, in_matrix=True),
}
