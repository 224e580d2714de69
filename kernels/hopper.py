"""Finds our kernels for Hopper, and says which matrices they can read."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor


def hopper_kernel(device: torch.device, module: str, name: str) -> Callable[..., Tensor] | None:
    """The function `name` of the Gluon `module` here; None on other chips, or if this Triton cannot import it."""
    return _gluon(module, name) if is_hopper(device) else None


def is_hopper(device: torch.device) -> bool:
    """Whether `device` is a Hopper GPU (H100, H200), for which these kernels were written and measured."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=32)
def _gluon(module: str, name: str) -> Callable[..., Tensor] | None:
    try:
        found: Callable[..., Tensor] = getattr(import_module(f".{module}", __package__), name)
    except ImportError:
        return None
    return found


def is_copied(matrix: Tensor) -> bool:
    """Whether bulk copies can fetch tiles of a matrix: its rows begin at multiples of 16 bytes, on Hopper or later.

    The answer must not depend on the batch, or bits would: callers pass whole outputs of products and norms.
    """
    if matrix.device.type == "cuda" and torch.cuda.get_device_capability(matrix.device) < (9, 0):
        return False
    size = matrix.dtype.itemsize
    return matrix.stride(0) * size % 16 == 0 and matrix.data_ptr() % 16 == 0
