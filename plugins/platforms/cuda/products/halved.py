"""Products of some rows of bfloat16 with nibbles, for which rows are two halves of 8-bit floats, on Hopper.

Knows no layer. Halves hold what counts of a bfloat16: nothing is rounded that other kernels would keep.
"""

from __future__ import annotations

import torch
from torch import Tensor

from frame.kernels.hopper import hopper_kernel
from frame.kernels.nibble_tiles import fits, pays

#: From so many rows on `nibbles_hopper` is taken: fewer read the nibbles as quickly in one launch.
_LEAST_HALVED_ROWS = 9


def halved(
    x: Tensor, packed: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, bias: Tensor | None
) -> Tensor | None:
    """`nibbles_hopper.product`, where there is one for the weight and so many rows, and it is the quicker one."""
    if len(x) < _LEAST_HALVED_ROWS or x.dtype != torch.bfloat16:
        return None
    if not fits(packed, scales, block, zeros, len(x)) or not pays(len(packed), packed.shape[1] * 8, len(x)):
        return None
    product = hopper_kernel(x.device, "nibbles_hopper", "product")
    return None if product is None else product(x, packed, scales, block, zeros, bias)
