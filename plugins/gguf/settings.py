"""The configuration of a model, as config.json states it, from the metadata of a GGUF file. Imports no torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import pi
from typing import Any

#: Architectures that are read: transformers' model type and class.
ARCHITECTURES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "mistral": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": ("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": ("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": ("gemma", "GemmaForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
    "phi3": ("phi3", "Phi3ForCausalLM"),
}
#: Layers of the Gemma models whose queries are scaled by hidden size / heads, as their code has it: 2's and 3's 27B.
_SCALED_BY_HIDDEN_SIZE = {"gemma2": 46, "gemma3": 62}
#: What Llama 3.1 and later state beside the factor; the file has the factors of all frequencies only.
_LLAMA3 = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}

#: Reads the values of a float32 tensor by its name; None where there is none.
ReadTensor = Callable[[str], Sequence[float] | None]


class Metadata:
    """The metadata of a model; `get` reads keys of its architecture."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.values = values
        self.architecture = str(values.get("general.architecture", ""))

    def get(self, key: str, default: Any = None) -> Any:
        """A value of the architecture; of one for each layer the first, where all are equal."""
        value = self.values.get(f"{self.architecture}.{key}", default)
        if isinstance(value, list) and value and len(set(map(str, value))) == 1:
            return value[0]
        return value

    def size(self, key: str) -> int:
        """A size that must be there; raises `ValueError` without it, or with several."""
        value = self.get(key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"its metadata must have a positive integer {self.architecture}.{key}, got {value!r:.80}")
        return value


def model_type_of(meta: Metadata) -> str:
    """transformers' model type; raises `ValueError` for an architecture that is not read."""
    return _kind_of(meta)[0]


def _kind_of(meta: Metadata) -> tuple[str, str]:
    if meta.architecture not in ARCHITECTURES:
        raise ValueError(
            f"it holds a model of the architecture {meta.architecture!r:.80}; frame reads of GGUF: "
            f"{', '.join(ARCHITECTURES)}"
        )
    if ARCHITECTURES[meta.architecture][0] == "llama" and meta.get("expert_count", 0):
        return "mixtral", "MixtralForCausalLM"
    return ARCHITECTURES[meta.architecture]


def read_settings(values: Mapping[str, Any], shapes: Mapping[str, Sequence[int]], read: ReadTensor) -> dict[str, Any]:
    """config.json for a model with this metadata and tensors of these shapes, without what says how it is stored.

    Raises `ValueError` for an architecture that is not read, or sizes that are missing.
    """
    meta = Metadata(values)
    model_type, name = _kind_of(meta)
    if "token_embd.weight" not in shapes:
        raise ValueError("it has no tensor token_embd.weight")
    heads, hidden = meta.size("attention.head_count"), meta.size("embedding_length")
    head_dim = meta.get("attention.key_length") or meta.get("rope.dimension_count") or hidden // heads
    if model_type == "phi3" and not meta.get("attention.key_length"):
        head_dim = hidden // heads
    settings: dict[str, Any] = {
        "architectures": [name],
        "model_type": model_type,
        "hidden_size": hidden,
        "intermediate_size": meta.get("feed_forward_length", 0) or meta.get("expert_feed_forward_length"),
        "num_hidden_layers": meta.size("block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": meta.get("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": meta.size("context_length"),
        "rms_norm_eps": meta.get("attention.layer_norm_rms_epsilon", 1e-6),
        "vocab_size": shapes["token_embd.weight"][0],
        "tie_word_embeddings": "output.weight" not in shapes,
        "rope_parameters": _rope(meta, head_dim, read),
        **_tokens(values),
    }
    biased = "blk.0.attn_q.bias" in shapes
    if model_type in ("llama", "qwen3", "qwen3_moe"):
        settings |= {"attention_bias": biased, "mlp_bias": "blk.0.ffn_down.bias" in shapes}
    more = _OF_TYPE.get(model_type)
    return settings if more is None else {**settings, **more(meta)}


def _tokens(values: Mapping[str, Any]) -> dict[str, Any]:
    named = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    found = {key: values.get(f"tokenizer.ggml.{name}_token_id") for key, name in named.items()}
    return {key: value for key, value in found.items() if isinstance(value, int)}


def end_tokens(values: Mapping[str, Any]) -> list[int]:
    """The tokens that end an output, or a turn."""
    found = (values.get(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom"))
    return list(dict.fromkeys(token for token in found if isinstance(token, int)))


def _rope(meta: Metadata, head_dim: int, read: ReadTensor) -> dict[str, Any]:
    """`rope_parameters`, of which Gemma 3 has two."""
    theta, kind = float(meta.get("rope.freq_base", 10000.0)), meta.get("rope.scaling.type", "none")
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": theta}
    factors, length = read("rope_freqs.weight"), meta.get("rope.scaling.original_context_length")
    if factors is not None:
        rope |= _llama3(factors, theta, head_dim)
    elif meta.architecture == "phi3":
        rope |= {"partial_rotary_factor": meta.get("rope.dimension_count", head_dim) / head_dim}
        long, short = (read(f"rope_factors_{name}.weight") for name in ("long", "short"))
        if long is not None and short is not None:
            rope |= {"rope_type": "longrope", "long_factor": list(long), "short_factor": list(short)}
            rope |= {"original_max_position_embeddings": length}
    elif kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": float(meta.get("rope.scaling.factor", 1.0))}
        rope |= {"original_max_position_embeddings": length} if kind == "yarn" and length else {}
    elif kind != "none":
        raise ValueError(f"its positions are scaled by {kind!r}; frame reads of GGUF: none, linear, yarn, longrope")
    if meta.architecture != "gemma3":
        return rope
    local = float(meta.get("rope.freq_base_swa", 10000.0))
    return {"full_attention": rope, "sliding_attention": {"rope_type": "default", "rope_theta": local}}


def _llama3(factors: Sequence[float], theta: float, head_dim: int) -> dict[str, Any]:
    """The settings from which the frequencies' factors follow; raises `ValueError` where they follow from none."""
    factor = max(factors)
    low, high, length = _LLAMA3.values()
    for index, found in enumerate(factors):
        wavelength = 2 * pi * theta ** (2 * index / head_dim)
        smooth = min(max((length / wavelength - low) / (high - low), 0.0), 1.0)
        if abs(found - 1 / ((1 - smooth) / factor + smooth)) > 1e-3 * found:
            raise ValueError("its rope_freqs.weight holds other factors than those of Llama 3")
    return {"rope_type": "llama3", "factor": float(factor), **_LLAMA3}


def _mixtral(meta: Metadata) -> dict[str, Any]:
    return {
        "num_local_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "sliding_window": None,
    }


def _qwen_moe(meta: Metadata) -> dict[str, Any]:
    settings = {
        "num_experts": meta.size("expert_count"),
        "num_experts_per_tok": meta.size("expert_used_count"),
        "moe_intermediate_size": meta.size("expert_feed_forward_length"),
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": meta.architecture == "qwen3moe",
    }
    if meta.architecture == "qwen2moe":
        settings["shared_expert_intermediate_size"] = meta.size("expert_shared_feed_forward_length")
    return settings


def _gemma(meta: Metadata) -> dict[str, Any]:
    heads, hidden = meta.size("attention.head_count"), meta.size("embedding_length")
    by_hidden = _SCALED_BY_HIDDEN_SIZE[meta.architecture] == meta.size("block_count")
    scalar = hidden // heads if by_hidden else meta.get("attention.key_length") or hidden // heads
    return {
        "query_pre_attn_scalar": scalar,
        "sliding_window": meta.get("attention.sliding_window", 4096),
        "attn_logit_softcapping": meta.get("attn_logit_softcapping"),
        "final_logit_softcapping": meta.get("final_logit_softcapping"),
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": _windowed(meta),
    }


def _windowed(meta: Metadata) -> list[str]:
    """Which layers see a window only: every second of Gemma 2, all but every sixth of Gemma 3."""
    step = 2 if meta.architecture == "gemma2" else 6
    return ["full_attention" if (n + 1) % step == 0 else "sliding_attention" for n in range(meta.size("block_count"))]


def _phi3(meta: Metadata) -> dict[str, Any]:
    original = meta.get("rope.scaling.original_context_length") or meta.size("context_length")
    return {
        "sliding_window": meta.get("attention.sliding_window") or None,
        "original_max_position_embeddings": original,
    }


_OF_TYPE: Mapping[str, Callable[[Metadata], dict[str, Any]]] = {
    "mixtral": _mixtral,
    "qwen2_moe": _qwen_moe,
    "qwen3_moe": _qwen_moe,
    "gemma2": _gemma,
    "gemma3_text": _gemma,
    "phi3": _phi3,
}
