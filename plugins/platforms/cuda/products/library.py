"""NVIDIA's two libraries, both through torch: cuBLAS, and cuBLASLt, which torch asks where a bias is added.

Which of them has the quicker kernel for a shape is measured (`times`). Knows no layer; our own products are in
`frame.kernels`.
"""

from __future__ import annotations

import torch
from torch import Tensor

#: The widest weight of a layer or a head.
_MAX_OUTPUTS = 1 << 19
_ZEROS: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b by cuBLAS: x [..., inputs], weight [outputs, inputs]."""
    return torch.nn.functional.linear(x, weight, bias)


def linear_lt(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b by cuBLASLt: x [rows, inputs], weight [outputs, inputs]. Where there is no bias, zeros are added."""
    if bias is None and len(weight) <= _MAX_OUTPUTS:
        zeros = _zeros(weight.dtype, x.device)
        bias = None if zeros is None else zeros[: len(weight)]
    return torch.nn.functional.linear(x, weight, bias)


def _zeros(dtype: torch.dtype, device: torch.device) -> Tensor | None:
    """As many as there may be outputs, a megabyte for each type; None while they cannot be made."""
    zeros = _ZEROS.get((dtype, device))
    if (
        zeros is None and not torch.cuda.is_current_stream_capturing()
    ):  # memory made inside a capture holds nothing before the first replay
        with torch.inference_mode(False):
            zeros = _ZEROS[dtype, device] = torch.zeros(_MAX_OUTPUTS, dtype=dtype, device=device)
    return zeros
