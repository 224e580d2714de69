"""Which of NVIDIA's two libraries multiplies ordinary steps: torch asks cuBLAS, and where a bias is added cuBLASLt.

Knows no layer; our own products are in `frame.kernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frame.kernels.hopper import is_hopper

#: Numbers of the smallest weight for which it matters which library chooses the kernel, and of one that is wider than
#: deep: of the layers of Qwen3 0.6B and 30B-A3B on an H200 none gained, query, key and value of Llama 8B neither.
_LARGE, _WIDE = 16 << 20, 64 << 20
#: The widest weight of a layer or a head.
_MAX_OUTPUTS = 1 << 19
_ZEROS: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b by whichever library is quicker: x [rows, inputs] or [..., inputs], weight [outputs, inputs]."""
    if bias is None and x.dim() == 2 and prefers_lt(x.shape[0], *weight.shape) and is_hopper(x.device):
        zeros = _nothing(weight.dtype, x.device)
        bias = None if zeros is None else zeros[: len(weight)]
    return torch.nn.functional.linear(x, weight, bias)


def prefers_lt(rows: int, outputs: int, inputs: int) -> bool:
    """Whether the kernels that cuBLASLt chooses are quicker, though they add nothing to each output: on an H200.

    Down and attention's output of Llama 8B took 7 to 17 % less time with 32 to 112 rows, gate and up, and the head,
    6 and 7 % with 64, and 1 % more with 48 and 96.
    """
    if outputs * inputs < _LARGE or outputs > _MAX_OUTPUTS:
        return False
    return 32 <= rows < 128 if outputs <= inputs else 48 < rows <= 64 and outputs * inputs >= _WIDE


def _nothing(dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """Zeros of as many outputs as there may be, a megabyte for each type; None while they cannot be made."""
    zeros = _ZEROS.get((dtype, device))
    if zeros is None and not torch.cuda.is_current_stream_capturing():  # what is recorded is not there yet
        with torch.inference_mode(False):
            zeros = _ZEROS[dtype, device] = torch.zeros(_MAX_OUTPUTS, dtype=dtype, device=device)
    return zeros
