"""Inputs for the timed ops, of the sizes of a model's step. Imports torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch

from frame.interfaces import RouterSpec
from frame.ops import Ops

_HEAD_DIM, _BLOCK, _EXPERTS = 64, 16, 64


@dataclass(frozen=True)
class Sizes:
    """Rows, columns of activations, columns of logits."""

    num_tokens: int
    hidden_size: int
    vocab_size: int


def reference(name: str) -> Callable[..., Any]:
    """The plain torch op."""
    found: Callable[..., Any] = getattr(Ops(), name)
    return partial(found, scale=_HEAD_DIM**-0.5) if name == "paged_attention" else found


def kernel(module: str, name: str) -> Callable[..., Any]:
    """The Triton kernel of the same name."""
    found: Callable[..., Any] = getattr(import_module(f"frame.kernels.{module}"), name)
    return found


def cases(device: str, sizes: Sizes) -> Mapping[str, Sequence[Any]]:
    """Op → its arguments: bfloat16 on a GPU, float32 on a CPU; the same numbers every time."""
    draw = torch.Generator().manual_seed(0)
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokens, hidden, vocab = sizes.num_tokens, sizes.hidden_size, sizes.vocab_size
    heads = max(2, hidden // _HEAD_DIM)

    def floats(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=draw).to(dtype).to(device)

    def ints(high: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, high, shape, generator=draw).to(device)

    logits = torch.randn(tokens, vocab, generator=draw).to(device)
    ones = torch.ones(tokens, device=device)
    streams, positions = ints(1 << 30, tokens), ints(256, tokens)
    blocks = 8 * tokens + 1
    cache = floats(2, blocks, _BLOCK, 2, _HEAD_DIM)
    table = (torch.arange(blocks - 1).view(tokens, 8) + 1).int().to(device)
    starts = torch.arange(tokens + 1, dtype=torch.int32, device=device)
    lengths = torch.full((tokens,), 8 * _BLOCK, dtype=torch.int32, device=device)
    cos_sin = torch.randn(256, _HEAD_DIM, generator=draw).to(device)
    top_k = torch.full((tokens,), 50, dtype=torch.int32, device=device)
    return {
        "linear": (floats(tokens, hidden), floats(hidden, hidden)),
        "write_kv": (floats(tokens, 2, _HEAD_DIM), floats(tokens, 2, _HEAD_DIM), cache, ints(blocks, tokens)),
        "paged_attention": (floats(tokens, heads, _HEAD_DIM), cache, starts, lengths, table),
        "rms_norm": (floats(tokens, hidden), floats(hidden), 1e-6),
        "add_rms_norm": (floats(tokens, hidden), floats(tokens, hidden), floats(hidden), 1e-6),
        "silu_mul": (floats(tokens, 2 * hidden),),
        "gelu_tanh_mul": (floats(tokens, 2 * hidden),),
        "rotary": (floats(tokens, heads, _HEAD_DIM), floats(tokens, 2, _HEAD_DIM), positions, cos_sin),
        "route": (floats(tokens, _EXPERTS), RouterSpec(_EXPERTS, 8)),
        "greedy": (logits,),
        "draw": (logits, ones, streams, positions),
        "keep_threshold": (logits, top_k, ones * 0.9),
        "top_logprobs": (logits, ints(vocab, tokens).int(), 5, True),
    }
