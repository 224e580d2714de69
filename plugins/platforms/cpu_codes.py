"""Products with codes in host memory.

Codes of eight bits with a scale for each row are multiplied themselves, on processors that multiply bytes. A row of x
becomes two or three rows of bytes, each the rest of the one before times 254. Their products with the codes are exact
integers, so that what is lost is what the last of them leaves: a 2^-16 of the row's largest value for 16-bit floats,
and a 2^-24 for float32. Other weights are put together in float32, some rows after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from .cpu_linear import product

#: Rows of bfloat16 up to which torch's product with int8 weights is the quickest; it rounds each result twice.
FEW_ROWS = 3
#: What must divide the outputs and inputs of that product, which reads beyond others.
_TILE = (16, 32)
#: Rows of x that are multiplied at once, so that little lies beside the result.
_ROWS = 256
#: Weights that are put together at once.
_IN_CACHE = 1 << 19
#: What a row of bytes leaves is as many times smaller than it.
_BASE = 254
#: The most products of bytes, at most 127 · 128 each, that have a sum in 32 bits.
MAX_INPUTS = (2**31 - 1) // (127 * 128)


@cache
def multiplies_bytes() -> bool:
    """Whether this processor has instructions for products of bytes, and torch's are exact with them."""
    if not getattr(torch.cpu, "_is_vnni_supported", bool)() or not hasattr(torch, "_int_mm"):
        return False
    codes = torch.tensor([[127], [-127], [1]], dtype=torch.int8).expand(3, 256).contiguous()
    try:
        for rows in (1, 3):
            x = codes[:rows] if rows > 1 else -codes[:1]
            wide = x.int() @ codes.t().int()
            if not torch.equal(torch._int_mm(x, codes.t()), wide):
                return False
    except RuntimeError:
        return False
    return True


def byte_linear(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None) -> Tensor:
    """x Wᵀ + b for x [..., K] and W[n, k] = codes[n, k] · scales[n], of int8 [N, K] and float32 [N, 1]."""
    given = x.reshape(-1, x.shape[-1])
    whole = all(size % tile == 0 for size, tile in zip(codes.shape, _TILE, strict=True))
    if x.dtype == torch.bfloat16 and len(given) <= FEW_ROWS and whole and codes.is_contiguous():
        ones = torch.ones(len(codes), dtype=x.dtype)
        out = torch._weight_int8pack_mm(given.contiguous(), codes, ones).mul_(scales.t())
    else:
        parts = [_by_bytes(rows, codes, scales) for rows in given.split(_ROWS)]
        out = parts[0] if len(parts) == 1 else torch.cat(parts)
    if bias is not None:
        out += bias
    return out.view(*x.shape[:-1], len(codes))


def _by_bytes(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    """x Wᵀ for x [M, K], in x's type."""
    rest, count = x.float(), 3 if x.dtype == torch.float32 else 2
    own = rest.abs().amax(-1, keepdim=True).clamp_min_(1e-30) / 127
    rest = rest / own
    digits = torch.empty(count, *x.shape, dtype=torch.int8)
    for place in range(count):
        rounded = rest.round()
        digits[place] = rounded
        if place + 1 < count:
            rest = rest.sub_(rounded).mul_(_BASE)
    sums = _sums(digits.flatten(0, 1), codes).view(count, len(x), -1)
    total = sums[-1].float()
    for place in reversed(range(count - 1)):
        total = total.mul_(1 / _BASE).add_(sums[place])
    return total.mul_(own).mul_(scales.t()).to(x.dtype)


def _sums(digits: Tensor, codes: Tensor) -> Tensor:
    """digits codesᵀ, of int8 [M, K] and [N, K], exactly: int32, or int64 where K is above MAX_INPUTS."""
    if digits.shape[1] <= MAX_INPUTS:
        return torch._int_mm(digits, codes.t())
    runs = zip(digits.split(MAX_INPUTS, 1), codes.split(MAX_INPUTS, 1), strict=True)
    return torch.stack([torch._int_mm(some.contiguous(), part.t()).long() for some, part in runs]).sum(0)


def linear_in_parts(
    x: Tensor, shape: tuple[int, int], weight: Callable[[slice], Tensor], bias: Tensor | None, rows_per: int = 1
) -> Tensor:
    """x Wᵀ + b for x [..., K] and W [N, K] = `shape`, of which `weight(rows)` puts runs of rows together in float32.

    Runs begin at multiples of `rows_per` and stay in a processor's cache. Products are float32 as well: that costs less
    than rounding the weight to 16 bits.
    """
    step = -(-max(1, _IN_CACHE // shape[1]) // rows_per) * rows_per
    wide = x.float()
    parts = [product(wide, weight(slice(first, first + step))) for first in range(0, shape[0], step)]
    out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
    return (out if bias is None else out.add_(bias)).to(x.dtype)
