"""What each attention layer of a checkpoint keeps, from config.json alone, as the models of this package build them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from frame.interfaces import DTYPE_BYTES, AnyKVSpec, FullKV, LatentKV, SlidingKV
from frame.settings import Checkpoint, ConfigError, ModelConfig, Registry, read_model_config

#: Families that use the sliding window in every layer; True: only where config.json sets `use_sliding_window`.
_EVERY_LAYER = {"mistral": False, "qwen3_moe": True, "phi3": False}
#: Families whose `layer_types` says which layers use the window; True as above.
_BY_LAYER = {"qwen2": True, "qwen3": True, "gemma2": False, "gemma3_text": False, "gemma3": False}
_NO_WINDOW = ("llama", "gpt2", "olmo2")
#: Families of latent attention, where a token keeps one vector in each layer.
LATENT = (
    "deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "glm4_moe_lite", "glm_moe_dsa", "minicpm3",
    "longcat_flash", "mistral4", "youtu",
)  # fmt: skip
#: Families without a KV cache: every token sees the whole prompt in one step.
ENCODERS = ("bert", "roberta", "xlm-roberta")


@dataclass(frozen=True)
class Shape:
    """Sizes of a model that memory depends on. `known` is False for a family that this file has no row for.

    `num_heads` is 0 where config.json states none: what the layers keep is then known only from the built model.
    `read_share` is the part of the weights that a token is multiplied with: of routed experts those that it chooses.
    """

    num_layers: int
    num_heads: int
    hidden_size: int
    intermediate_size: int
    tied: bool
    kv_specs: Mapping[str, AnyKVSpec]
    known: bool
    read_share: float = 1.0


def read_shape(checkpoint: Checkpoint, kv_dtype: str, dtype: str = "") -> Shape:
    """`dtype` is the model's, by default as the checkpoint says; raises `ConfigError` without the sizes."""
    config, family = read_model_config(checkpoint, Registry.load()), checkpoint.model_type
    gpt2 = family == "gpt2"
    layers = _size(config, "n_layer" if gpt2 else "num_hidden_layers")
    hidden = _size(config, "n_embd" if gpt2 else "hidden_size")
    known = any(family in families for families in (_EVERY_LAYER, _BY_LAYER, _NO_WINDOW, ENCODERS, LATENT))
    stateful = not known and getattr(config, "num_attention_heads", None) is None
    heads = 0 if stateful else _size(config, "n_head" if gpt2 else "num_attention_heads")
    kv_heads = heads if gpt2 else int(getattr(config, "num_key_value_heads", None) or heads)
    head_dim = hidden // heads if gpt2 else int(getattr(config, "head_dim", None) or hidden // max(1, heads))
    specs: dict[str, AnyKVSpec] = {}
    if family in LATENT:
        specs = _latents(config, layers, kv_dtype, dtype or checkpoint.dtype)
    for index in range(0 if family in ENCODERS or stateful or specs else layers):
        window = _window(config, family, index)
        sizes: dict[str, Any] = {"num_kv_heads": kv_heads, "head_dim": head_dim, "dtype": kv_dtype}
        specs[f"layers.{index}"] = SlidingKV(**sizes, window=window) if window else FullKV(**sizes)
    return Shape(
        num_layers=layers,
        num_heads=heads,
        hidden_size=hidden,
        intermediate_size=_intermediate(checkpoint.text, hidden),
        tied=_tied(checkpoint, config),
        kv_specs=specs,
        known=known,
        read_share=_read_share(checkpoint.text, layers, hidden * head_dim * 2 * (heads + kv_heads), hidden),
    )


def _latents(config: ModelConfig, layers: int, kv_dtype: str, dtype: str) -> dict[str, AnyKVSpec]:
    """A latent for each token in each layer, and a key in those that have an index."""
    rank, rope = _size(config, "kv_lora_rank"), _size(config, "qk_rope_head_dim")
    latent = LatentKV(dim=rank + rope, dtype=kv_dtype)
    if DTYPE_BYTES[kv_dtype] == 1:  # the turned part stays as it is computed
        latent = LatentKV(dim=rank, dtype=kv_dtype, extra_bytes=rope * DTYPE_BYTES[dtype])
    specs: dict[str, AnyKVSpec] = {f"layers.{index}": latent for index in range(layers)}
    if key := int(getattr(config, "index_head_dim", None) or 0):
        kinds = getattr(config, "indexer_types", None) or ["full"] * layers
        for index in (index for index in range(layers) if kinds[index] == "full"):
            specs[f"layers.{index}.indexer"] = LatentKV(dim=key, dtype=kv_dtype)
    return specs


def _read_share(text: Mapping[str, Any], layers: int, attention: int, hidden: int) -> float:
    """As `Shape.read_share`; `attention` weights are in each layer."""
    experts = int(text.get("num_experts") or text.get("num_local_experts") or text.get("n_routed_experts") or 0)
    if not experts:
        return 1.0
    chosen = int(text.get("num_experts_per_tok") or 1)
    each = 3 * hidden * int(text.get("moe_intermediate_size") or text.get("intermediate_size") or hidden)
    others = layers * attention + int(text.get("vocab_size") or 0) * hidden * (
        1 if text.get("tie_word_embeddings") else 2
    )
    return (others + layers * chosen * each) / (others + layers * experts * each)


def _window(config: ModelConfig, family: str, index: int) -> int:
    """The window of layer `index`, 0 for full attention; unknown families follow `layer_types` if they state it."""
    if family in _EVERY_LAYER:
        switched, here = _EVERY_LAYER[family], True
    elif family in _BY_LAYER:
        switched, here = _BY_LAYER[family], config.layer_types[index] == "sliding_attention"
    elif family in _NO_WINDOW:
        return 0
    else:
        kinds = getattr(config, "layer_types", None) or []
        switched, here = False, index < len(kinds) and kinds[index] == "sliding_attention"
    if not here or (switched and not config.use_sliding_window):
        return 0
    return int(config.sliding_window or 0)


def _intermediate(text: Mapping[str, Any], hidden: int) -> int:
    """Columns of the widest part of a layer for one token; routed experts count as often as a token visits them."""
    if text.get("moe_intermediate_size"):
        return int(text["moe_intermediate_size"]) * int(text.get("num_experts_per_tok") or 1)
    stated = text.get("intermediate_size") or text.get("n_inner") or 4 * hidden
    return int(max(stated) if isinstance(stated, list) else stated)


def _tied(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    """Whether the output head is the embedding; asks transformers (slow) only where config.json does not say."""
    for part in (checkpoint.text, checkpoint.hf):
        if part.get("tie_word_embeddings") is not None:
            return bool(part["tie_word_embeddings"])
    return bool(getattr(config, "tie_word_embeddings", False))


def _size(config: ModelConfig, name: str) -> int:
    value = getattr(config, name, None)
    if not isinstance(value, int) or value < 1:
        raise ConfigError(f"{name} in config.json must be a positive integer, got {value!r}")
    return value
