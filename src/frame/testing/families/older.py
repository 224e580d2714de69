"""Rows of decoders with LayerNorm, parallel parts, learned positions, ALiBi, and joined queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .row import TINY, Family

#: Heads that share the hidden size evenly, each with a key and a value of its own.
_PLAIN: Mapping[str, Any] = {k: v for k, v in TINY.items() if k not in ("head_dim", "num_key_value_heads")}
_GROUPED: Mapping[str, Any] = {**_PLAIN, "num_key_value_heads": 2}
_COHERE: Mapping[str, Any] = {**_GROUPED, "logit_scale": 0.25}
_HALF_ROPE: Mapping[str, Any] = {
    "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": 0.5, "rope_type": "default"}
}
#: Model types that call these sizes as GPT-2 does.
_GPT: Mapping[str, Any] = {
    **{name: TINY[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
}
_OPT: Mapping[str, Any] = {**_PLAIN, "ffn_dim": 96, "word_embed_proj_dim": 64, "init_std": 0.2}
_BLOOM: Mapping[str, Any] = {**_PLAIN, "n_layer": 3, "n_head": 4}
_MPT: Mapping[str, Any] = {
    **{name: TINY[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "d_model": 64,
    "n_layers": 3,
    "n_heads": 4,
    "max_seq_len": 256,
}

#: Twelve heads are no power of two, and divide over four ranks. Falcon has four, since transformers rounds the products
#: of its slopes and positions to bfloat16, which is exact for these.
ROWS: Mapping[str, Family] = {
    "cohere": Family("CohereForCausalLM", "cohere", {**_COHERE, "use_qk_norm": True, "attention_bias": True}),
    "cohere-plain": Family("CohereForCausalLM", "cohere", {**_COHERE, "tie_word_embeddings": False}, in_matrix=True),
    "cohere2": Family(
        "Cohere2ForCausalLM",
        "cohere2",
        {
            **_COHERE,
            "num_hidden_layers": 4,
            "sliding_window": 24,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "starcoder2": Family("Starcoder2ForCausalLM", "starcoder2", {**_GROUPED, "sliding_window": 24}, in_matrix=True),
    "starcoder2-plain": Family(
        "Starcoder2ForCausalLM",
        "starcoder2",
        {**_GROUPED, "use_bias": False, "tie_word_embeddings": False, "hidden_act": "relu"},
        in_matrix=True,
    ),
    "stablelm": Family(
        "StableLmForCausalLM", "stablelm", {**_GROUPED, **_HALF_ROPE, "use_qkv_bias": True}, in_matrix=True
    ),
    "stablelm-parallel": Family(
        "StableLmForCausalLM",
        "stablelm",
        {**_GROUPED, **_HALF_ROPE, "use_parallel_residual": True, "qk_layernorm": True},
    ),
    "phi": Family("PhiForCausalLM", "phi", {**_PLAIN, **_HALF_ROPE}, in_matrix=True),
    "phi-norms": Family("PhiForCausalLM", "phi", {**_GROUPED, **_HALF_ROPE, "qk_layernorm": True}, in_matrix=True),
    "gpt-neox": Family("GPTNeoXForCausalLM", "gpt_neox", _PLAIN, in_matrix=True),
    "gpt-neox-in-turn": Family(
        "GPTNeoXForCausalLM",
        "gpt_neox",
        {**_PLAIN, "use_parallel_residual": False, "attention_bias": False, "tie_word_embeddings": True},
        in_matrix=True,
    ),
    "gpt-neox-japanese": Family(
        "GPTNeoXJapaneseForCausalLM", "gpt_neox_japanese", {**_PLAIN, "intermediate_multiple_size": 2}, in_matrix=True
    ),
    "persimmon": Family("PersimmonForCausalLM", "persimmon", {**_PLAIN, **_HALF_ROPE}, in_matrix=True),
    "persimmon-plain": Family(
        "PersimmonForCausalLM", "persimmon", {**_PLAIN, **_HALF_ROPE, "qk_layernorm": False}, in_matrix=True
    ),
    "opt": Family("OPTForCausalLM", "opt", _OPT),
    "opt-350m": Family("OPTForCausalLM", "opt", {**_OPT, "do_layer_norm_before": False, "word_embed_proj_dim": 32}),
    "opt-plain": Family(
        "OPTForCausalLM",
        "opt",
        {
            **_OPT,
            "enable_bias": False,
            "_remove_final_layer_norm": True,
            "activation_function": "gelu",
            "tie_word_embeddings": False,
        },
        in_matrix=True,
    ),
    "xglm": Family(
        "XGLMForCausalLM",
        "xglm",
        {
            **_PLAIN,
            "d_model": 64,
            "attention_heads": 4,
            "num_layers": 3,
            "ffn_dim": 96,
            "init_std": 0.2,
            "pad_token_id": 7,
        },
        in_matrix=True,
    ),
    "xglm-unscaled": Family(
        "XGLMForCausalLM",
        "xglm",
        {
            **_PLAIN,
            "d_model": 64,
            "attention_heads": 4,
            "num_layers": 3,
            "ffn_dim": 96,
            "init_std": 0.2,
            "scale_embedding": False,
        },
        in_matrix=True,
    ),
    "biogpt": Family("BioGptForCausalLM", "biogpt", _PLAIN, in_matrix=True),
    "biogpt-unscaled": Family("BioGptForCausalLM", "biogpt", {**_PLAIN, "scale_embedding": False}, in_matrix=True),
    "falcon-7b": Family("FalconForCausalLM", "falcon", _PLAIN, in_matrix=True),
    "falcon-40b": Family(
        "FalconForCausalLM", "falcon", {**_PLAIN, "new_decoder_architecture": True, "num_kv_heads": 2, "bias": True}
    ),
    "falcon-11b": Family(
        "FalconForCausalLM",
        "falcon",
        {
            **_PLAIN,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 1,
            "tie_word_embeddings": False,
        },
        in_matrix=True,
    ),
    "falcon-rw": Family(
        "FalconForCausalLM",
        "falcon",
        {**_PLAIN, "alibi": True, "multi_query": False, "parallel_attn": False, "bias": True},
        in_matrix=True,
    ),
    "bloom": Family("BloomForCausalLM", "bloom", {**_BLOOM, "hidden_size": 96, "n_head": 12}),
    "bloom-post-norm": Family(
        "BloomForCausalLM", "bloom", {**_BLOOM, "apply_residual_connection_post_layernorm": True}, in_matrix=True
    ),
    "mpt": Family(
        "MptForCausalLM", "mpt", {**_MPT, "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.5}}, in_matrix=True
    ),
    "mpt-plain": Family("MptForCausalLM", "mpt", {**_MPT, "d_model": 96, "n_heads": 12}, in_matrix=True),
    "gptj": Family("GPTJForCausalLM", "gptj", {**_GPT, "rotary_dim": 8}),
    "codegen": Family(
        "CodeGenForCausalLM", "codegen", {**_GPT, "rotary_dim": 8, "n_head": 8, "n_inner": 96}, in_matrix=True
    ),
    "gpt1": Family("OpenAIGPTLMHeadModel", "openai-gpt", _GPT, in_matrix=True),
    "gpt-bigcode": Family("GPTBigCodeForCausalLM", "gpt_bigcode", _GPT, in_matrix=True),
    "gpt-bigcode-many": Family(
        "GPTBigCodeForCausalLM",
        "gpt_bigcode",
        {**_GPT, "multi_query": False, "scale_attn_weights": False, "n_inner": 96},
        in_matrix=True,
    ),
    "gpt-neo": Family(
        "GPTNeoForCausalLM",
        "gpt_neo",
        {
            **_PLAIN,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "window_size": 24,
            "attention_types": [[["global", "local"], 2]],
        },
    ),
    "modernbert-decoder": Family(
        "ModernBertDecoderForCausalLM",
        "modernbert-decoder",
        {**_PLAIN, "num_hidden_layers": 4, "local_attention": 32},
        in_matrix=True,
    ),
    "modernbert-decoder-biases": Family(
        "ModernBertDecoderForCausalLM",
        "modernbert-decoder",
        {
            **_PLAIN,
            "num_hidden_layers": 4,
            "local_attention": 32,
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "decoder_bias": False,
            "tie_word_embeddings": False,
        },
        in_matrix=True,
    ),
    "ctrl": Family("CTRLLMHeadModel", "ctrl", {**_GPT, "dff": 96}, in_matrix=True),
}
