"""Decodes over a cache of e4m3 by a kernel of their own: for which layers, and the sizes of its launches."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

import torch

from frame.interfaces import AttentionSpec
from frame.kernels.hopper import is_hopper

#: A split shorter than this costs more to join than it saves, where a rule says nothing else.
MIN_NARROW_SPLIT = 256


@dataclass(frozen=True)
class NarrowRule:
    """How rows are split while whole rows make up to `programs` programs for each multiprocessor.

    A row has at most `parts` parts, none shorter than `min_span` keys; 0: than 256.
    """

    programs: float
    parts: int
    min_span: int = 0


#: Measured on an H200 (`benchmarks/kernels/narrow_sweep.py`): about eight programs, of one warp each, run on a
#: multiprocessor at once.
NARROW_RULES = (
    NarrowRule(0.3, 32),
    NarrowRule(0.6, 16),
    NarrowRule(1.2, 8),
    NarrowRule(2.2, 4),
    NarrowRule(4.3, 4, 1024),
    NarrowRule(8.6, 2, 2048),
    NarrowRule(float("inf"), 1),
)


def narrow_kernel(spec: AttentionSpec) -> Any:
    """The module of decodes over a cache of e4m3 for this layer on this device; None where there is none."""
    plain = not (spec.window or spec.soft_cap or spec.sinks or spec.alibi or spec.returns_lse)
    if not plain or spec.context.ranks > 1:
        return None
    try:
        from frame.kernels import decode_narrow
    except ImportError:
        return None
    groups = spec.num_heads // spec.num_kv_heads
    if not decode_narrow.fits(spec.head_dim, groups, spec.block_size, spec.dtype, spec.kv_dtype):
        return None
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return decode_narrow if interpreted or is_hopper(torch.device(spec.device_type)) else None


def narrow_launch(narrow: Any, share: float, max_seq_len: int) -> Any:
    """Sizes for rows of up to `max_seq_len` tokens that make `share` programs for each multiprocessor."""
    rule = next(rule for rule in NARROW_RULES if share <= rule.programs)
    parts = max(1, min(rule.parts, max_seq_len // (rule.min_span or MIN_NARROW_SPLIT)))
    splits = 1 << (parts.bit_length() - 1)
    return narrow.NarrowLaunch(splits, rule.min_span if splits > 1 else 0)
