"""Where our kernels for Hopper are, and which products of some rows they do in ordinary steps. Knows no layer."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from importlib import import_module

import torch
from torch import Tensor

#: Outputs of the widest weight that 2 to 8 rows multiply by `linear_rows`, but for gates: layers of Llama 8B, of up to
#: 28672 × 4096, took 8 % less time by it on an H200. What is wider is a head, and left to the library.
MAX_OUTPUTS = 32768
#: Numbers of the largest weight that 9 to 16 rows do: up to 5120 × 2048 they gained a tenth, beyond it nothing.
MAX_NUMBERS = 12 << 20


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


def hopper_rows(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, gated: bool = False) -> Tensor | None:
    """`linear_rows.product` of x [rows, inputs], or None where it cannot serve or was measured not to pay."""
    pays = (gated or len(weight) <= MAX_OUTPUTS) if len(x) <= 8 else weight.numel() <= MAX_NUMBERS
    if not 2 <= len(x) <= 16 or not pays or x.device.type != "cuda":
        return None
    if x.dtype not in (torch.bfloat16, torch.float16) or weight.dtype != x.dtype:
        return None
    if x.stride(1) != 1 or weight.stride(1) != 1 or x.shape[1] % 64 or not (is_copied(x) and is_copied(weight)):
        return None
    kernel = hopper_kernel(x.device, "linear_rows", "product")
    return None if kernel is None else kernel(x, weight, bias, gated=gated)


def is_copied(matrix: Tensor) -> bool:
    """Whether the chip's copy engine can fetch tiles: rows at multiples of 16 bytes, on Hopper or later.

    This follows from the layer and the chip, never from the batch: `flat` is a product's or a norm's output.
    """
    if matrix.device.type == "cuda" and torch.cuda.get_device_capability(matrix.device) < (9, 0):
        return False
    size = matrix.dtype.itemsize
    return matrix.stride(0) * size % 16 == 0 and matrix.data_ptr() % 16 == 0
