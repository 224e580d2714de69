"""Stores a step's keys and values, for backends whose attention comes from a library. Computes no attention."""

from __future__ import annotations

from torch import Tensor

from frame.kernels.attention import write_kv
from frame.ops import Ops


def store(key: Tensor, value: Tensor, kv_cache: Tensor, slots: Tensor) -> None:
    """`key`, `value` [T, Hk, D] at `slots` [T], by our kernel where it runs (the reference waits for the device)."""
    write = write_kv if kv_cache.is_cuda else Ops.write_kv
    write(key, value, kv_cache, slots)
