"""The order in which oneDNN puts weights, so far as the kernels in C read it: what does not lie so is left to oneDNN.

That order is oneDNN's own affair, so every weight is looked at after it was packed.
"""

from __future__ import annotations

import ctypes

import numpy as np
import torch
from torch import Tensor

#: Outputs of a block.
BLOCK = 64
#: Columns that lie side by side, for each type.
_PAIR = {torch.float32: 1, torch.bfloat16: 2}
#: Numbers of each weight that are compared.
_COMPARED = 4096


def packed_width(weight: Tensor, packed: Tensor) -> int:
    """Columns of a block of `packed`, which is `weight` [N, K] in oneDNN's order; 0 where that is not the known one.

    Number (n, k) lies in block n // 64: behind the columns before k, or before its pair, at 64 places for each.
    """
    pair, (outputs, columns) = _PAIR.get(weight.dtype, 0), weight.shape
    blocks = -(-outputs // BLOCK)
    try:
        size, address = torch.ops.mkldnn._nbytes(packed) // weight.element_size(), address_of(packed)
    except (AttributeError, RuntimeError):
        return 0
    width = size // (blocks * BLOCK)
    if not pair or width * blocks * BLOCK != size or not columns <= width < columns + BLOCK:
        return 0
    draw = np.random.default_rng(outputs * columns)
    n, k = draw.integers(outputs, size=_COMPARED), draw.integers(columns, size=_COMPARED)
    n[:2], k[:2] = (0, outputs - 1), (0, columns - 1)
    places = (n // BLOCK * width + k // pair * pair) * BLOCK + n % BLOCK * pair + k % pair
    number = ctypes.c_uint32 if pair == 1 else ctypes.c_uint16
    raw = np.ctypeslib.as_array((number * size).from_address(address))
    some = weight.detach()[torch.from_numpy(n), torch.from_numpy(k)]  # a weight that numpy has seen cannot be freed
    bits = some.view(torch.int32 if pair == 1 else torch.int16).numpy().view(raw.dtype)
    return width if np.array_equal(raw[places], bits) else 0


def address_of(packed: Tensor) -> int:
    """Where the numbers of a packed weight lie."""
    found: int = torch.ops.mkldnn.data_ptr.default(packed)
    return found
