"""Rows of decoders: Llama and what is built like it, Gemma, GPT-2."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .row import TINY, Family, rope

_GEMMA: Mapping[str, Any] = {
    **TINY,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GPT2: Mapping[str, Any] = {
    **{name: TINY[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
}


#: One line a family: the line that a new model adds.
ROWS: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", {**TINY, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": Family("LlamaForCausalLM", "llama", {**TINY, "tie_word_embeddings": True}),
    "llama-linear": Family("LlamaForCausalLM", "llama", rope(rope_type="linear", factor=4.0)),
    "llama-dynamic": Family("LlamaForCausalLM", "llama", rope(rope_type="dynamic", factor=2.0)),
    "llama-llama3": Family(
        "LlamaForCausalLM",
        "llama",
        rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-yarn": Family(
        "LlamaForCausalLM", "llama", rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "llama-longrope": Family(
        "LlamaForCausalLM",
        "llama",
        rope(
            rope_type="longrope",
            factor=4.0,
            original_max_position_embeddings=256,
            short_factor=[1.0 + i / 16 for i in range(8)],
            long_factor=[2.0 + i for i in range(8)],
        ),
    ),
    "mistral": Family("MistralForCausalLM", "mistral", {**TINY, "sliding_window": 24}),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", {k: v for k, v in TINY.items() if k != "head_dim"}),
    "qwen2-sliding": Family(
        "Qwen2ForCausalLM",
        "qwen2",
        {
            **{k: v for k, v in TINY.items() if k != "head_dim"},
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", TINY),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            **TINY,
            "num_experts": 8,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 48,
            "norm_topk_prob": True,
            "mlp_only_layers": [1],
        },
    ),
    "gemma2": Family(
        "Gemma2ForCausalLM",
        "gemma2",
        {**_GEMMA, "attn_logit_softcapping": 20.0, "final_logit_softcapping": 0.5},
        embedding_scale=0.05,
    ),
    "gemma3": Family("Gemma3ForCausalLM", "gemma3_text", _GEMMA, embedding_scale=0.05),
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", TINY),
    "phi3": Family("Phi3ForCausalLM", "phi3", {**TINY, "sliding_window": 24}),
    "phi3-longrope": Family(
        "Phi3ForCausalLM",
        "phi3",
        {
            **rope(
                rope_type="longrope",
                partial_rotary_factor=0.75,
                short_factor=[1.0 + i / 16 for i in range(6)],
                long_factor=[2.0 + i for i in range(6)],
            ),
            "original_max_position_embeddings": 256,
            "tie_word_embeddings": True,
        },
    ),
    "gpt2": Family("GPT2LMHeadModel", "gpt2", _GPT2),
}
