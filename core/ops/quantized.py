"""Weights from their codes, and codes of rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from . import Ops
    from .layers import ExpertBiases

_ROWS = 2048


@dataclass(frozen=True)
class CodedWeights:
    """Weights [E, N, K] as codes [E, N, C] of `dequantize`, or int32 [E, N, C / 8] of `dequantize_packed`.

    With a `table` they are those of `dequantize_table`, of 4-bit floats (e2m1) if it says so. `columns` are the K of C.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]
    zeros: Tensor | None = None
    table: Tensor | None = None
    numbers: Tensor | None = None
    columns: slice | None = None
    is_float4: bool = False

    def weight(self, ops: Ops, dtype: torch.dtype) -> Tensor:
        """[E, N, K]."""
        if self.table is not None:
            given = self.codes, self.scales, self.table, self.numbers, dtype
            found = ops.dequantize_table(*given, is_float4=self.is_float4)
        elif self.codes.dtype == torch.int32:
            found = ops.dequantize_packed(self.codes, self.scales, self.zeros, dtype)
        else:
            found = ops.dequantize(self.codes, self.scales, self.block, self.zeros, dtype)
        return found if self.columns is None else found[..., self.columns].contiguous()

    def chosen(self, experts: Tensor) -> CodedWeights:
        """Those of some experts, in their order."""
        zeros, numbers = (None if one is None else one[experts] for one in (self.zeros, self.numbers))
        return replace(self, codes=self.codes[experts], scales=self.scales[experts], zeros=zeros, numbers=numbers)


def only_chosen(
    gate_up: CodedWeights, down: CodedWeights, biases: ExpertBiases, ids: Tensor, first: int
) -> tuple[CodedWeights, CodedWeights, ExpertBiases, Tensor]:
    """A copy of the experts' weights for each of `ids` [T, top_k] that is in [first, first + E), and its number."""
    own = (ids >= first) & (ids < first + len(gate_up.codes))
    chosen = torch.where(own, ids - first, 0).flatten()
    numbers = torch.arange(len(chosen), dtype=ids.dtype, device=ids.device).view(ids.shape)
    inner, outer = (None if bias is None else bias[chosen] for bias in biases)
    return gate_up.chosen(chosen), down.chosen(chosen), (inner, outer), torch.where(own, numbers, -1)


def dequantize(
    codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """w[n, k] = (codes[n, k] - zeros[n / r, k / c]) · scales[n / r, k / c] with (r, c) = `block`, in float32.

    `codes` [..., N, K] are 8-bit floats or integers, `scales` and `zeros` [..., ⌈N / r⌉, ⌈K / c⌉]. The result is cast
    to `dtype`.
    """
    weight = codes.float()
    if zeros is not None:
        weight = weight - _spread(zeros.float(), block, codes.shape[-2:])
    weight = weight * _spread(scales.float(), block, codes.shape[-2:])
    return weight if dtype is None else weight.to(dtype)


def _spread(values: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """[..., ⌈N / r⌉, ⌈K / c⌉] → what broadcasts to [..., N, K]."""
    for dim, per, size in zip((-2, -1), block, shape, strict=True):
        if values.shape[dim] > 1 and per > 1:
            values = values.repeat_interleave(per, dim).narrow(dim, 0, size)
    return values


def unpack_nibbles(packed: Tensor) -> Tensor:
    """int32 [..., K / 8] → uint8 [..., K]: eight codes in each word, the first in its lowest bits."""
    shifts = torch.arange(0, 32, 4, dtype=torch.int32, device=packed.device)
    return ((packed[..., None] >> shifts) & 15).to(torch.uint8).flatten(-2)


def dequantize_packed(
    packed: Tensor, scales: Tensor, zeros: Tensor | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """As `dequantize`, of nibbles int32 [..., N, K / 8], with scales and zeros [..., N, groups]; the zero is else 8."""
    codes = unpack_nibbles(packed)
    block = (1, codes.shape[-1] // scales.shape[-1])
    zeros = torch.full_like(scales, 8) if zeros is None else zeros
    return dequantize(codes, scales, block, zeros, dtype)


def quantize_rows(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(codes of `dtype`, float32 scales [..., 1]) of x [..., K], each row by its own largest value."""
    most = torch.finfo(dtype).max if dtype.is_floating_point else torch.iinfo(dtype).max
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp_min(1e-12) / most
    codes = wide / scales
    return (codes if dtype.is_floating_point else codes.round_()).clamp_(-most, most).to(dtype), scales


def dequantize_table(
    packed: Tensor, scales: Tensor, table: Tensor, numbers: Tensor | None = None, dtype: torch.dtype | None = None,
    *, is_float4: bool = False,
) -> Tensor:  # fmt: skip
    """w[n, k] = table[code[n, k]] · scales[n, k / g] · numbers[n], in float32, then cast to `dtype`.

    `packed` int32 [..., N, K / 8] holds nibbles, `scales` are [..., N, K / g], of uint8 two to the power of (scale -
    127), `numbers` float32 [..., N, 1], and `table` has sixteen. A platform need not read it where it `is_float4`: then
    it has the 4-bit floats (e2m1) in the order of their bits.
    """
    del is_float4
    weight = torch.empty(*packed.shape[:-1], packed.shape[-1] * 8, dtype=dtype or torch.float32, device=packed.device)
    given, wide, out = packed.flatten(0, -2), scales.flatten(0, -2), weight.flatten(0, -2)
    own = None if numbers is None else numbers.flatten(0, -2)
    for first in range(0, len(given), _ROWS):  # so that little lies beside the result
        some = slice(first, first + _ROWS)
        factors = (wide[some].int() << 23).view(torch.float32) if scales.dtype == torch.uint8 else wide[some].float()
        factors = factors if own is None else factors * own[some]
        values = table[unpack_nibbles(given[some]).int()].unflatten(-1, (scales.shape[-1], -1))
        out[some] = (values * factors[..., None]).flatten(-2)
    return weight
