"""Layers that models are put together from. They know shards and weights, and no request."""

from __future__ import annotations

from .attention import Attention
from .build import ModelBuild
from .embedding import Head, VocabEmbedding
from .experts import Experts
from .linear import AttentionInput, Linear, RowLinear, Rows
from .norm import LayerNorm, RMSNorm
from .normed import normed_linear, normed_silu_mul
from .rotary import RotaryEmbedding, rope_frequencies
from .weights import LoadReport, WeightError, WeightMap, WeightSlot, load_weights

__all__ = [
    "Attention",
    "AttentionInput",
    "Experts",
    "Head",
    "LayerNorm",
    "Linear",
    "LoadReport",
    "ModelBuild",
    "RMSNorm",
    "RotaryEmbedding",
    "RowLinear",
    "Rows",
    "VocabEmbedding",
    "WeightError",
    "WeightMap",
    "WeightSlot",
    "load_weights",
    "normed_linear",
    "normed_silu_mul",
    "rope_frequencies",
]
