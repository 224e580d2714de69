"""Products of rows that are rounded to 8 bits with weights of such codes: by the library where it has them.

Knows no layer. Up to 64 rows take as long as reading the codes, which a kernel of ours divides among more programs.
Scales of blocks, other types of activations and sizes that the library refuses are our kernels' as well.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from frame.kernels import coded_rows, quantized
from frame.kernels.hopper import hopper_kernel

#: Rows of both matrices begin at multiples of so many bytes.
_ALIGNMENT = 16
#: From so many rows on `rounded_hopper` is the quickest (`benchmarks/kernels/rounded_sweep.py`); fewer stay exact.
_LEAST_RINGED_ROWS = 9


def library_takes(x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int]) -> bool:
    """Whether `library_product` multiplies x [rows, K] by codes [N, K] with scales of rows."""
    of_rows = block[0] == 1 and scales.shape[-1] == 1 and scales.is_contiguous()
    aligned = all(size % _ALIGNMENT == 0 for size in codes.shape) and codes.is_contiguous()
    return of_rows and aligned and codes.dtype == torch.float8_e4m3fn and x.dtype == torch.bfloat16


def library_product(
    x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None = None, static: Tensor | None = None
) -> Tensor:
    """x Wᵀ + b for bfloat16 x [rows, K] and W = codes [N, K] · float32 scales [N, 1]: two launches.

    Rows of x get scales of their own, unless `static` [1] is given. Sums are kept in float32.
    """
    found, own = quantized.rounded_rows(x, codes, scales, static)
    recipe = ScalingType.RowWise
    return scaled_mm(found, codes.t(), own, recipe, scales.view(1, -1), recipe, bias=bias, output_dtype=x.dtype)


def few_rows(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    bias: Tensor | None = None,
    static: Tensor | None = None,
) -> Tensor:
    """As `product`, for 2 to 64 rows and 8-bit floats: two launches."""
    found, own = quantized.rounded_rows(x, codes, scales, static)
    return coded_rows.rounded_product(found, own, codes, scales, block, bias, x.dtype)


def ringed(
    x: Tensor, codes: Tensor, scales: Tensor, block: tuple[int, int], bias: Tensor | None, static: Tensor | None = None
) -> Tensor | None:
    """`rounded_hopper.product`, where there is one for the weight and so many rows."""
    if len(x) < _LEAST_RINGED_ROWS or x.dtype.itemsize != 2:
        return None
    fits, product = (hopper_kernel(x.device, "rounded_hopper", name) for name in ("fits", "product"))
    if fits is None or product is None or not fits(codes, scales, block, len(x)):
        return None
    return product(x, codes, scales, bias, static)


def product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    block: tuple[int, int],
    bias: Tensor | None = None,
    static: Tensor | None = None,
) -> Tensor:
    """x Wᵀ + b for x [rows, K] that is rounded to the type of codes [N, K]."""
    floats = codes.dtype.is_floating_point
    if floats and 1 < len(x) <= coded_rows.MOST_ROWS and coded_rows.fits(codes, scales, block, len(x)):
        return few_rows(x, codes, scales, block, bias, static)
    if library_takes(x, codes, scales, block):
        return library_product(x, codes, scales, bias, static)
    return quantized.rounded_product(x, codes, scales, block, bias, static)
