"""Rows of dense decoders that are Llama but for traits told as data: each trait on and off."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .row import TINY, Family, rope

_MIXED: Mapping[str, Any] = {
    **TINY,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_BIASED: Mapping[str, Any] = {**TINY, "attention_bias": True, "mlp_bias": True}
_MULTIPLIED: Mapping[str, Any] = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.4,
    "residual_multiplier": 0.3,
    "logits_scaling": 0.5,
}
#: Gemma 4 without embeddings for each layer.
GEMMA4: Mapping[str, Any] = {
    **_MIXED,
    "num_hidden_layers": 6,
    "layer_types": ["sliding_attention", "full_attention"] * 3,
    "global_head_dim": 32,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": TINY["vocab_size"],
}
_GEMMA3N: Mapping[str, Any] = {
    **{name: value for name, value in GEMMA4.items() if name != "global_head_dim"},
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": TINY["vocab_size"] - 100,
    "altup_num_inputs": 3,
    "laurel_rank": 8,
    "final_logit_softcapping": 0.5,
}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}


def _row(architecture: str, model_type: str, config: Mapping[str, Any] = TINY, scale: float = 1.0) -> Family:
    """A row whose traits another row shows."""
    return Family(architecture, model_type, config, scale, in_matrix=True)


#: What shows a trait is in `make test`; the same with the trait off, or of another family, is in `make matrix`.
ROWS: Mapping[str, Family] = {
    "gemma": Family("GemmaForCausalLM", "gemma", {**TINY, "tie_word_embeddings": True}, embedding_scale=0.05),
    "gemma-untied": _row(
        "GemmaForCausalLM",
        "gemma",
        {**TINY, "tie_word_embeddings": False, "attention_bias": True},
    ),
    "gemma3n": Family(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        {
            **_GEMMA3N,
            "num_kv_shared_layers": 3,
            "intermediate_size": [96, 64, 96, 64, 96, 64],
            "activation_sparsity_pattern": [0.6, 0.6, 0.0, 0.0, 0.6, 0.0],
            "altup_active_idx": 1,
        },
        embedding_scale=0.05,
    ),
    "gemma3n-plain": _row(
        "Gemma3nForCausalLM",
        "gemma3n_text",
        {**_GEMMA3N, "num_kv_shared_layers": 0, "altup_correct_scale": False, "attention_bias": True},
        0.05,
    ),
    "gemma4": Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {**GEMMA4, "attention_k_eq_v": True, "num_global_key_value_heads": 1, "final_logit_softcapping": 0.5},
        embedding_scale=0.05,
    ),
    "gemma4-shared": Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 3, "use_double_wide_mlp": True},
        embedding_scale=0.05,
    ),
    "gemma4-biased": _row(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {**GEMMA4, "hidden_size_per_layer_input": 8, "num_kv_shared_layers": 2, "attention_bias": True},
        0.05,
    ),
    "vaultgemma": _row(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        {
            **_MIXED,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 0.5,
            "attention_bias": True,
        },
        0.05,
    ),
    "vaultgemma-uncapped": _row(
        "VaultGemmaForCausalLM",
        "vaultgemma",
        {
            **_MIXED,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "hidden_activation": "gelu",
        },
        0.05,
    ),
    "glm": Family("GlmForCausalLM", "glm", TINY),
    "glm-unbiased": _row(
        "GlmForCausalLM",
        "glm",
        {**rope(rope_type="default", partial_rotary_factor=1.0), "attention_bias": False, "tie_word_embeddings": True},
    ),
    "glm4": Family("Glm4ForCausalLM", "glm4", TINY),
    "glm4-yarn": _row("Glm4ForCausalLM", "glm4", {**rope(partial_rotary_factor=0.5, **_YARN), "attention_bias": False}),
    "granite": Family("GraniteForCausalLM", "granite", {**_BIASED, **_MULTIPLIED}),
    "granite-tied": _row(
        "GraniteForCausalLM",
        "granite",
        {**TINY, **_MULTIPLIED, "residual_multiplier": 1.0, "logits_scaling": 8.0, "tie_word_embeddings": True},
    ),
    "granite-swa": Family(
        "GraniteSWAForCausalLM",
        "granite_swa",
        {**_MIXED, **_MULTIPLIED, "layer_rope_theta": [10000.0, 0, 100.0, 10000.0], "mlp_bias": True},
    ),
    "granite-swa-plain": _row(
        "GraniteSWAForCausalLM", "granite_swa", {**_MIXED, "attention_bias": True, "tie_word_embeddings": False}
    ),
    "hyperclovax": _row("HyperCLOVAXForCausalLM", "hyperclovax", {**_BIASED, **_MULTIPLIED, "logits_scaling": 2.0}),
    "hyperclovax-pre": _row(
        "HyperCLOVAXForCausalLM",
        "hyperclovax",
        {**TINY, "embedding_multiplier": 3.0, "use_post_norm": False},
    ),
    "smollm3": Family(
        "SmolLM3ForCausalLM", "smollm3", {**TINY, "no_rope_layers": [1, 0, 1], "tie_word_embeddings": True}
    ),
    "smollm3-sliding": _row(
        "SmolLM3ForCausalLM",
        "smollm3",
        {
            **_BIASED,
            "num_hidden_layers": 4,
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 24,
            "tie_word_embeddings": False,
        },
    ),
    "smollm3-layer-types": _row("SmolLM3ForCausalLM", "smollm3", {**_MIXED, "no_rope_layers": [1, 1, 1, 1]}),
    "seed-oss": _row("SeedOssForCausalLM", "seed_oss", TINY),
    "seed-oss-biased": _row("SeedOssForCausalLM", "seed_oss", {**_BIASED, "attention_out_bias": True}),
    "seed-oss-unbiased": _row("SeedOssForCausalLM", "seed_oss", {**TINY, "attention_bias": False}),
    "ernie4-5": Family("Ernie4_5ForCausalLM", "ernie4_5", {**TINY, "use_bias": True}),
    "ernie4-5-untied": _row("Ernie4_5ForCausalLM", "ernie4_5", {**TINY, "tie_word_embeddings": False}),
    "helium": _row("HeliumForCausalLM", "helium", {**TINY, "tie_word_embeddings": True}),
    "helium-biased": _row("HeliumForCausalLM", "helium", _BIASED),
    "arcee": Family("ArceeForCausalLM", "arcee", TINY),
    "arcee-biased": _row("ArceeForCausalLM", "arcee", {**_BIASED, "hidden_act": "gelu"}),
    "ministral": _row("MinistralForCausalLM", "ministral", _MIXED),
    "ministral-full": _row("MinistralForCausalLM", "ministral", {**TINY, "layer_types": ["full_attention"] * 3}),
    "ministral3": Family(
        "Ministral3ForCausalLM",
        "ministral3",
        rope(**{**_YARN, "original_max_position_embeddings": 32, "llama_4_scaling_beta": 0.5}),
    ),
    "ministral3-sliding": _row(
        "Ministral3ForCausalLM", "ministral3", {**rope(llama_4_scaling_beta=0.0, **_YARN), "sliding_window": 24}
    ),
    "cwm": _row("CwmForCausalLM", "cwm", {**_MIXED, "mlp_bias": True}),
    "cwm-full": _row(
        "CwmForCausalLM",
        "cwm",
        {**rope(rope_type="default"), "layer_types": ["full_attention"] * 3},
    ),
    "olmo": Family("OlmoForCausalLM", "olmo", {**TINY, "clip_qkv": 0.7}),
    "olmo-unclipped": _row("OlmoForCausalLM", "olmo", {**TINY, "attention_bias": True, "tie_word_embeddings": True}),
    "olmo3": _row(
        "Olmo3ForCausalLM",
        "olmo3",
        {
            **_MIXED,
            "rope_parameters": {
                "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
                "full_attention": _YARN,
            },
        },
    ),
    "olmo3-full": _row(
        "Olmo3ForCausalLM", "olmo3", {**TINY, "layer_types": ["full_attention"] * 3, "attention_bias": True}
    ),
    "exaone4": Family("Exaone4ForCausalLM", "exaone4", _MIXED),
    "exaone4-full": _row(
        "Exaone4ForCausalLM",
        "exaone4",
        {**TINY, "sliding_window": None, "layer_types": ["full_attention"] * 3, "tie_word_embeddings": True},
    ),
    "apertus": Family("ApertusForCausalLM", "apertus", TINY),
    "apertus-biased": _row(
        "ApertusForCausalLM", "apertus", {**rope(rope_type="default"), "attention_bias": True, "hidden_act": "relu2"}
    ),
    "hunyuan": Family(
        "HunYuanDenseV1ForCausalLM", "hunyuan_v1_dense", rope(rope_type="dynamic", alpha=50.0, factor=1.0)
    ),
    "hunyuan-plain": _row(
        "HunYuanDenseV1ForCausalLM",
        "hunyuan_v1_dense",
        {**rope(rope_type="default"), "attention_bias": True, "tie_word_embeddings": True},
    ),
    "nemotron": Family("NemotronForCausalLM", "nemotron", TINY),
    "nemotron-biased": _row(
        "NemotronForCausalLM", "nemotron", {**_BIASED, **rope(rope_type="default", partial_rotary_factor=1.0)}
    ),
    "jais2": _row("Jais2ForCausalLM", "jais2", TINY),
    "jais2-unbiased": _row("Jais2ForCausalLM", "jais2", {**TINY, "attention_bias": False, "mlp_bias": False}),
    "nanochat": Family("NanoChatForCausalLM", "nanochat", {**TINY, "final_logit_softcapping": 0.5}),
    "nanochat-uncapped": _row(
        "NanoChatForCausalLM", "nanochat", {**TINY, "final_logit_softcapping": None, "attention_bias": True}
    ),
    "bitnet": Family("BitNetForCausalLM", "bitnet", TINY),
    "bitnet-biased": _row("BitNetForCausalLM", "bitnet", {**TINY, "attention_bias": True, "hidden_act": "silu"}),
}
