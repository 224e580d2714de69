"""GGUF files of tiny models, written by the gguf package, each with a dequantised twin for transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from safetensors.torch import load_file, save_file

from frame.plugins.gguf.types import BY_NAME
from tests.gguf.drawn import random_blocks

#: transformers' model type → the architecture in GGUF files.
ARCHITECTURES = {
    "llama": "llama", "mistral": "llama", "mixtral": "llama", "qwen2": "qwen2", "qwen3": "qwen3",
    "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gemma2": "gemma2", "gemma3_text": "gemma3", "gemma": "gemma",
    "phi3": "phi3",
}  # fmt: skip
#: What makes random values of a type that the library only reads about 0.2.
_SIZES = {"Q2_K": 0.012, "Q3_K": 6e-3, "Q4_K": 4e-4, "Q5_K": 2e-4, "Q6_K": 1e-4, "IQ4_NL": 3e-3, "IQ4_XS": 1e-4,
          "IQ1_S": 0.02, "IQ1_M": 0.02, "IQ2_XXS": 4e-3, "IQ2_XS": 4e-3, "IQ2_S": 4e-3, "IQ3_XXS": 2e-3,
          "IQ3_S": 2e-3}  # fmt: skip
PLAIN = ("F32", "F16", "BF16")


def encoded(weight: np.ndarray, kind: str, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """(bytes of rows, their values): the library quantises, or for types that it only reads blocks are random."""
    number = gguf.GGMLQuantizationType[kind]
    if kind in _SIZES:
        block = BY_NAME[kind]
        shape = (*weight.shape[:-1], weight.shape[-1] // block.values)
        data = random_blocks(kind, shape, seed, _SIZES[kind]).reshape(*weight.shape[:-1], -1)
    else:
        data = gguf.quantize(weight, number)
    return data, gguf.dequantize(data, number).astype(np.float32).reshape(weight.shape)


def write_gguf(
    plain: Path, path: Path, kinds: Sequence[tuple[str, str]] = (), split: int = 0, more: dict[str, Any] | None = None
) -> Path:
    """Writes the checkpoint `plain` as GGUF, and the values that were stored into `plain` itself.

    `kinds` are (pattern of names in the file, type); the first that matches counts, F32 if none does. With `split`
    there are so many files.
    """
    config = json.loads((plain / "config.json").read_text())
    arch = ARCHITECTURES[config["model_type"]]
    number = next(key for key, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(number, config["num_hidden_layers"])
    weights = {name: tensor.float().numpy() for name, tensor in load_file(plain / "model.safetensors").items()}
    heads = config["num_attention_heads"], config.get("num_key_value_heads") or config["num_attention_heads"]
    stored: dict[str, tuple[np.ndarray, str]] = {}
    for number, (name, tensors) in enumerate(_stacked(weights, names).items()):
        weight = np.stack([weights[one] for one in tensors]) if len(tensors) > 1 else weights[tensors[0]]
        kind = next((kind for pattern, kind in kinds if re.search(pattern, name) and weight.ndim > 1), "F32")
        turned = heads[0] if ".attn_q." in name else heads[1] if ".attn_k." in name else 0
        turned = turned if arch == "llama" else 0
        shifted = arch.startswith("gemma") and name.endswith("norm.weight")
        if name.endswith("ffn_gate_inp_shexp.weight"):
            weight = weight.reshape(-1)
        data, values = encoded(_interleaved(weight, turned) + shifted, kind, number)
        stored[name] = data, kind
        back = values.reshape(weight.shape)
        back = back.reshape(turned, -1, 2, *back.shape[1:]).swapaxes(1, 2).reshape(back.shape) if turned else back
        for one, value in zip(tensors, back if len(tensors) > 1 else [back], strict=True):
            weights[one] = (value - shifted).reshape(weights[one].shape)
    save_file({name: torch.from_numpy(np.ascontiguousarray(one)) for name, one in weights.items()},
              plain / "model.safetensors", {"format": "pt"})  # fmt: skip
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=-(-len(stored) // split) if split else 0)
    _add_settings(writer, config, arch, weights)
    for key, value in (more or {}).items():
        add = {list: writer.add_array, str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32}
        add[type(value)](key, value)
    for name, (data, kind) in stored.items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """The rows of a head's two halves in turn, as llama.cpp's converter puts them."""
    if not heads:
        return weight
    return weight.reshape(heads, 2, -1, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


def _stacked(weights: dict[str, Any], names: Any) -> dict[str, list[str]]:
    """Names in the file → names in the checkpoint, those of all experts for one."""
    found: dict[str, list[str]] = {}
    for name in weights:
        base, _, end = name.rpartition(".")
        whole = re.sub(r"experts\.\d+", "experts", base)
        target = names.get_name(whole)
        assert target is not None, name
        found.setdefault(f"{target}.{end}", []).append(name)
    for tensors in found.values():
        tensors.sort(key=lambda name: [int(number) for number in re.findall(r"\d+", name)])
    return found


def _add_settings(writer: Any, config: dict[str, Any], arch: str, weights: dict[str, np.ndarray]) -> None:
    rope = config["rope_parameters"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_key_length(head_dim)
    writer.add_rope_freq_base(rope.get("full_attention", rope)["rope_theta"])
    writer.add_rope_dimension_count(head_dim)
    if (experts := config.get("num_local_experts") or config.get("num_experts")) is not None:
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config["num_experts_per_tok"])
    if "moe_intermediate_size" in config:
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    if "shared_expert_intermediate_size" in config:
        writer.add_expert_shared_feed_forward_length(config["shared_expert_intermediate_size"])
    if arch in ("gemma2", "gemma3", "phi3"):
        writer.add_sliding_window(config["sliding_window"])
    if config.get("attn_logit_softcapping"):
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    if config.get("final_logit_softcapping"):
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if rope.get("rope_type") == "llama3":
        writer.add_tensor("rope_freqs.weight", _llama3_factors(rope, head_dim))
    if rope.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope.get("original_max_position_embeddings", 0))


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(head_dim=head_dim, hidden_size=head_dim, num_attention_heads=1, rope_parameters=rope)
    plain = 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    return (plain / ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()).astype(np.float32)
