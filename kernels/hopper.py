"""Where our kernels for Hopper are, and what they can read. Knows no layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor


def hopper_kernel(device: torch.device, module: str, name: str) -> Callable[..., Tensor] | None:
    """A function of a module here in Gluon; None on what is no Hopper, or where Triton's Gluon has changed."""
    return _gluon(module, name) if is_hopper(device) else None


def is_hopper(device: torch.device) -> bool:
    """Whether a device is of the chips that what is measured here was measured on."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


@lru_cache(maxsize=8)
def _gluon(module: str, name: str) -> Callable[..., Tensor] | None:
    try:
        found: Callable[..., Tensor] = getattr(import_module(f".{module}", __package__), name)
    except ImportError:
        return None
    return found


def is_copied(matrix: Tensor) -> bool:
    """Whether the chip's copy engine can fetch tiles: rows at multiples of 16 bytes, on Hopper or later.

    This follows from the layer and the chip, never from the batch: `flat` is a product's or a norm's output.
    """
    if matrix.device.type == "cuda" and torch.cuda.get_device_capability(matrix.device) < (9, 0):
        return False
    size = matrix.dtype.itemsize
    return matrix.stride(0) * size % 16 == 0 and matrix.data_ptr() % 16 == 0
