"""Which of NVIDIA's two libraries multiplies ordinary steps: torch asks cuBLAS, and with a bias cuBLASLt.

Knows no layer; our own products are in `frame.kernels`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

#: Rows for which cuBLASLt chooses kernels that take up to 15 % less time than those of cuBLAS, and never more than
#: they do: layers of Llama 8B, Qwen3 0.6B and 30B-A3B on an H200. With fewer or more rows neither is always quicker.
LT_ROWS = range(32, 97)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b by whichever library is quicker: x [rows, inputs] or [..., inputs], weight [outputs, inputs]."""
    if bias is None and x.dim() == 2 and x.shape[0] in LT_ROWS and is_hopper(x):
        with lt():
            return torch.nn.functional.linear(x, weight)
    return torch.nn.functional.linear(x, weight, bias)


def is_hopper(x: Tensor) -> bool:
    """Whether x is on a chip that this was measured on; one that is only pretended has no libraries."""
    there = x.device.type == "cuda" and torch.backends.cuda.is_built()
    return there and torch.cuda.get_device_capability(x.device) == (9, 0)


@contextmanager
def lt() -> Iterator[None]:
    """Products inside are cuBLASLt's; what the process prefers otherwise stays."""
    before = torch.backends.cuda.preferred_blas_library()
    torch.backends.cuda.preferred_blas_library("cublaslt")
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before)
