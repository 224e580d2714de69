"""Products with weights in host memory, by oneDNN: one call costs more than MKL's, and large ones are done sooner.

A weight may be packed, which is to put it into the order in which the instructions read it: it then is an opaque
tensor, which nothing but `product` and `to_dense` can read.
"""

from __future__ import annotations

import platform
from functools import cache

import torch
from torch import Tensor
from torch.nn import functional

from .invariant_ops import rows_are_alike

#: Elements of the smallest weight that is packed. The call costs 10 µs, which smaller ones do not win back.
LEAST_PACKED = 1 << 19
#: The same where kernels of ours spare few rows that call. Products of more were quicker from these sizes on.
LEAST_READ = {torch.float32: 1 << 16, torch.bfloat16: 1 << 12}
#: Multiplications from which a float32 product with a weight that is not packed is quicker by oneDNN.
LEAST_PRODUCT = 1 << 21
#: For how many rows a weight is packed. That order was as quick as any for one row, and the quickest for several.
PACKED_ROWS = 512


@cache
def has_onednn() -> bool:
    """Whether torch has oneDNN's products, on the kind of processor that they were timed on.

    They are operators of torch's own compiler, which another release may change, so they are tried.
    """
    if platform.machine() not in ("x86_64", "AMD64") or not torch.backends.mkldnn.is_available():
        return False
    weight = torch.arange(12.0).view(3, 4)
    try:
        found = [_multiply(weight, one, weight[:, 0]) for one in (weight, _reordered(weight))]
    except (AttributeError, RuntimeError, TypeError):
        return False
    return all(torch.allclose(one, functional.linear(weight, weight, weight[:, 0])) for one in found)


@cache
def packs(dtype: torch.dtype) -> bool:
    """Whether weights of this type are packed: equal rows of a product must get equal bits, as those of others do."""
    if not has_onednn() or dtype not in (torch.float32, torch.bfloat16):
        return False
    if dtype == torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    return rows_are_alike(dtype, torch.device("cpu"), lambda x, weight: product(x, _reordered(weight)))


def is_packed(weight: Tensor, *, read: bool = False) -> bool:
    """See `Ops.packs`; `read`: kernels of ours multiply a few rows by packed weights, in a third of oneDNN's time."""
    least = min(LEAST_READ.get(weight.dtype, LEAST_PACKED), LEAST_PACKED) if read else LEAST_PACKED
    plain = weight.dim() == 2 and weight.device.type == "cpu" and not weight.is_mkldnn and weight.is_contiguous()
    return plain and weight.numel() >= least and packs(weight.dtype)


def packed(weight: Tensor, *, read: bool = False) -> Tensor | None:
    """See `Ops.packed`, and `is_packed`."""
    return _reordered(weight) if is_packed(weight, read=read) else None


def _reordered(weight: Tensor) -> Tensor:
    found: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), PACKED_ROWS)
    return found


def product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x Wᵀ + b for x [..., K] and a weight [N, K], packed or not."""
    if not weight.is_mkldnn:
        large = x.dtype == weight.dtype == torch.float32 and x.numel() * len(weight) >= LEAST_PRODUCT
        if not (large and weight.is_contiguous() and has_onednn()):
            return functional.linear(x, weight, bias)
    rows = x.reshape(-1, x.shape[-1])
    if not len(rows):
        return x.new_empty(*x.shape[:-1], len(weight))
    return _multiply(rows, weight, bias).view(*x.shape[:-1], len(weight))


def _multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    added = None if bias is None else bias.contiguous()  # strides of a bias would not be heeded
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x.contiguous(), weight, added, "none", [], "")
    return out
