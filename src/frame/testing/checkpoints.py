"""Tiny random Hugging Face checkpoints, one row a family, for tests against transformers. Nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

_TOKENS = 512
_SPECIAL = ("<pad>", "<bos>", "<eos>")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


@dataclass(frozen=True)
class Family:
    """One row of the table: the architecture, transformers' model type, and what its tiny configuration sets.

    `embedding_scale` shrinks random embeddings where the model would otherwise only repeat its newest token.
    """

    architecture: str
    model_type: str
    config: Mapping[str, Any] = field(default_factory=dict)
    embedding_scale: float = 1.0


_TINY: Mapping[str, Any] = {
    "vocab_size": _TOKENS,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GEMMA: Mapping[str, Any] = {
    **_TINY,
    "num_hidden_layers": 4,
    "sliding_window": 24,
    "query_pre_attn_scalar": 24,
    "layer_types": ["sliding_attention", "full_attention"] * 2,
}
_GPT2: Mapping[str, Any] = {
    **{name: _TINY[name] for name in ("vocab_size", "pad_token_id", "bos_token_id", "eos_token_id")},
    "n_embd": 64,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
}


def _rope(**parameters: Any) -> dict[str, Any]:
    return {**_TINY, "rope_parameters": {"rope_theta": 10000.0, **parameters}}


#: One line a family: the line that a new model adds.
FAMILIES: Mapping[str, Family] = {
    "llama": Family("LlamaForCausalLM", "llama", {**_TINY, "attention_bias": True, "mlp_bias": True}),
    "llama-tied": Family("LlamaForCausalLM", "llama", {**_TINY, "tie_word_embeddings": True}),
    "llama-linear": Family("LlamaForCausalLM", "llama", _rope(rope_type="linear", factor=4.0)),
    "llama-dynamic": Family("LlamaForCausalLM", "llama", _rope(rope_type="dynamic", factor=2.0)),
    "llama-llama3": Family(
        "LlamaForCausalLM",
        "llama",
        _rope(
            rope_type="llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=64,
        ),
    ),
    "llama-yarn": Family(
        "LlamaForCausalLM", "llama", _rope(rope_type="yarn", factor=4.0, original_max_position_embeddings=64)
    ),
    "llama-longrope": Family(
        "LlamaForCausalLM",
        "llama",
        _rope(
            rope_type="longrope",
            factor=4.0,
            original_max_position_embeddings=256,
            short_factor=[1.0 + i / 16 for i in range(8)],
            long_factor=[2.0 + i for i in range(8)],
        ),
    ),
    "mistral": Family("MistralForCausalLM", "mistral", {**_TINY, "sliding_window": 24}),
    "qwen2": Family("Qwen2ForCausalLM", "qwen2", {k: v for k, v in _TINY.items() if k != "head_dim"}),
    "qwen2-sliding": Family(
        "Qwen2ForCausalLM",
        "qwen2",
        {
            **{k: v for k, v in _TINY.items() if k != "head_dim"},
            "use_sliding_window": True,
            "sliding_window": 24,
            "max_window_layers": 1,
        },
    ),
    "qwen3": Family("Qwen3ForCausalLM", "qwen3", _TINY),
    "qwen3-moe": Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        {
            **_TINY,
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
    "olmo2": Family("Olmo2ForCausalLM", "olmo2", _TINY),
    "phi3": Family("Phi3ForCausalLM", "phi3", {**_TINY, "sliding_window": 24}),
    "phi3-longrope": Family(
        "Phi3ForCausalLM",
        "phi3",
        {
            **_rope(
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


def make_checkpoint(
    folder: Path,
    family: str,
    *,
    seed: int = 0,
    tokenizer: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | None = None,
    **overrides: Any,
) -> Path:
    """Writes a random checkpoint of a row of `FAMILIES` into `folder` and returns it.

    `overrides` replace values of the row's configuration. Weights are large enough that the best token stands out.
    With `tokenizer` a byte-level tokenizer and a chat template are written too.
    """
    if family not in FAMILIES:
        raise ValueError(f"no model family {family!r}; there are: {', '.join(FAMILIES)}")
    from transformers import AutoConfig, AutoModelForCausalLM

    row = FAMILIES[family]
    config = AutoConfig.for_model(
        row.model_type, architectures=[row.architecture], **{**row.config, "initializer_range": 0.2, **overrides}
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        roughen(model, row.embedding_scale)
    sharding = {} if max_shard_size is None else {"max_shard_size": max_shard_size}
    model.to(dtype).save_pretrained(folder, **sharding)
    if tokenizer:
        write_tokenizer(folder)
    return folder


def roughen(model: Any, embedding_scale: float) -> None:
    """Makes norm weights and biases random: at their constant start a model that ignores them would pass."""
    with torch.no_grad():
        model.get_input_embeddings().weight.mul_(embedding_scale)
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)


def write_tokenizer(folder: Path) -> None:
    """Writes a byte-level tokenizer of 259 tokens (bytes after <pad>, <bos>, <eos>) and a plain chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: index for index, token in enumerate([*_SPECIAL, *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(_SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": _SPECIAL[0],
        "bos_token": _SPECIAL[1],
        "eos_token": _SPECIAL[2],
        "chat_template": _TEMPLATE,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
