"""Estimates the number of weights of a checkpoint from config.json, before its files are downloaded.

Families that are not known are counted as decoders with gated layers. Biases and norms are counted where families have
them, so that tests hold the sum against files within a hundredth.
"""

from __future__ import annotations

from frame.settings import Checkpoint, ModelConfig, Registry, read_model_config

from .layers import ENCODERS, LATENT, Shape
from .weights import Weights

#: Families whose queries, keys and values have biases, whose queries and keys have norms, and with four norms a layer.
_BIASED, _NORMED, _FOUR_NORMS = ("qwen2",), ("qwen3", "gemma3"), ("gemma2", "gemma3")


def estimate_weights(checkpoint: Checkpoint, shape: Shape, dtype_bytes: int) -> Weights:
    """What `read_weights` will find when the files are there; `dtype_bytes`: size of the dtype in config.json."""
    config, family = read_model_config(checkpoint, Registry.load()), checkpoint.model_type
    if family in ENCODERS:
        elements = _encoder(config, checkpoint.vocab_size, shape)
    elif family == "gpt2":
        elements = _gpt2(config, checkpoint.vocab_size, shape)
    else:
        elements = _decoder(config, family, checkpoint.vocab_size, shape)
    return weights_of(elements, checkpoint.dtype, dtype_bytes)


def weights_of(elements: int, dtype: str, dtype_bytes: int) -> Weights:
    """So many weights, all of one type, of which no file is there."""
    num_bytes = elements * dtype_bytes
    return Weights(0, {dtype: num_bytes}, elements, num_bytes)


def _decoder(config: ModelConfig, family: str, vocab_size: int, shape: Shape) -> int:
    hidden, heads = shape.hidden_size, int(config.num_attention_heads)
    spec = next(iter(shape.kv_specs.values()))
    head_dim, kv_heads = getattr(spec, "head_dim", 0), getattr(spec, "num_kv_heads", 0)
    queries, keys = heads * head_dim, kv_heads * head_dim
    layer = hidden * (queries + 2 * keys) + queries * hidden + hidden * 2
    if family in LATENT:
        layer = _latent_attention(config, hidden, heads) + hidden * 2
    if family not in LATENT and (family in _BIASED or getattr(config, "attention_bias", None)):
        layer += queries + 2 * keys + (0 if family in _BIASED else hidden)
    if family.startswith(_NORMED):
        layer += 2 * head_dim
    if family == "olmo2":  # over all heads
        layer += queries + keys
    if family.startswith(_FOUR_NORMS):
        layer += 2 * hidden
    total = shape.num_layers * layer
    total += sum(_index(config, hidden) for name in shape.kv_specs if name.endswith(".indexer"))
    for index in range(shape.num_layers):
        total += _feed_forward(config, index, hidden, shape.intermediate_size)
    return total + hidden + vocab_size * hidden * (1 if shape.tied else 2)


def _feed_forward(config: ModelConfig, index: int, hidden: int, intermediate: int) -> int:
    """A gated layer, or its router and experts."""
    experts = int(getattr(config, "num_experts", None) or getattr(config, "num_local_experts", None) or 0)
    kinds, first = getattr(config, "mlp_layer_types", None), getattr(config, "first_k_dense_replace", None)
    dense = index in (getattr(config, "mlp_only_layers", None) or ()) or (
        kinds[index] == "dense" if kinds else index < (first or 0)
    )
    if not experts:
        return 3 * hidden * intermediate
    inner = int(getattr(config, "intermediate_size", None) or intermediate)
    if dense or (index + 1) % int(getattr(config, "decoder_sparse_step", None) or 1):
        return 3 * hidden * inner
    each = 3 * hidden * int(getattr(config, "moe_intermediate_size", None) or inner)
    return hidden * experts + (experts + int(getattr(config, "n_shared_experts", None) or 0)) * each


def _latent_attention(config: ModelConfig, hidden: int, heads: int) -> int:
    """Projections of queries and latents, and of the output."""
    rank, rope, nope, value = (
        int(getattr(config, name)) for name in ("kv_lora_rank", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim")
    )
    small = int(getattr(config, "q_lora_rank", None) or 0)
    queries = hidden * small + small * heads * (nope + rope) if small else hidden * heads * (nope + rope)
    return queries + hidden * (rank + rope) + rank * heads * (nope + value) + heads * value * hidden


def _index(config: ModelConfig, hidden: int) -> int:
    """What chooses the tokens of sparse attention."""
    dim, heads = int(config.index_head_dim), int(config.index_n_heads)
    return int(config.q_lora_rank) * heads * dim + hidden * (dim + heads)


def _gpt2(config: ModelConfig, vocab_size: int, shape: Shape) -> int:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    layer = hidden * (4 * hidden + 2 * inner) + 3 * hidden + hidden + inner + hidden + 4 * hidden
    embeddings = (vocab_size + int(config.n_positions)) * hidden
    return shape.num_layers * layer + embeddings + 2 * hidden + (0 if shape.tied else vocab_size * hidden)


def _encoder(config: ModelConfig, vocab_size: int, shape: Shape) -> int:
    hidden, inner = shape.hidden_size, shape.intermediate_size
    layer = 4 * (hidden + 1) * hidden + 2 * hidden * inner + inner + hidden + 4 * hidden
    rows = vocab_size + int(config.max_position_embeddings) + int(getattr(config, "type_vocab_size", None) or 2)
    return shape.num_layers * layer + (rows + 2) * hidden + (hidden + 1) * hidden
