"""Blocks whose scales are codes (Q4_K, Q5_K, Q6_K) or whose codes are those of a table, held as kernels read them.

A file lays the parts of a block side by side in a length that no load of a device likes. Here each part is a tensor of
its own, with the columns in their order: no more bytes than in the file but for the scales of Q4_K, Q5_K and IQ4_XS,
which are bytes instead of six bits (4 of 144 or 176 bytes more, or 2 of 136), and 64 bytes for a table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from frame.ops import unpack_nibbles

from ..quantization.packing import pack_nibbles
from .blocks import TABLES, codes_of, half_exponents
from .types import BY_NAME

if TYPE_CHECKING:
    from frame.kernels.nibbles import Nibbles


class Super(NamedTuple):
    """A type: bits of a code beyond four, columns of a scale, the code of zero, where the float16 numbers lie.

    These multiply the scales, whose type is `scales`, and the minima.
    """

    high: int
    group: int
    zero: int
    outer: tuple[int, ...]
    scales: torch.dtype


SUPER: Mapping[str, Super] = {
    "Q4_K": Super(0, 32, 0, (0, 2), torch.uint8),
    "Q5_K": Super(1, 32, 0, (0, 2), torch.uint8),
    "Q6_K": Super(2, 16, 32, (208,), torch.int8),
    "IQ4_NL": Super(0, 32, 0, (), torch.float16),
    "IQ4_XS": Super(0, 32, 0, (0,), torch.int8),
    "MXFP4": Super(0, 32, 0, (), torch.uint8),
}


@dataclass(frozen=True)
class Planes:
    """The parts of weights [N, K]: `frame.kernels.nibbles.Nibbles` says what they are."""

    low: Tensor
    high: Tensor | None
    scales: Tensor
    minima: Tensor | None
    outer: Tensor | None
    zero: int
    table: Tensor | None = None

    @property
    def tensors(self) -> dict[str, Tensor]:
        """Those that are there and have rows, by name."""
        named = {name: getattr(self, name) for name in ("low", "high", "scales", "minima", "outer")}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    @classmethod
    def of(cls, tensors: Mapping[str, Tensor], zero: int, table: Tensor | None = None) -> Planes:
        """Of tensors by name."""
        high, minima, outer = (tensors.get(name) for name in ("high", "minima", "outer"))
        return cls(tensors["low"], high, tensors["scales"], minima, outer, zero, table)

    def to(self, device: torch.device | str) -> Planes:
        """The same elsewhere."""
        table = None if self.table is None else self.table.to(device)
        return self.of({name: tensor.to(device) for name, tensor in self.tensors.items()}, self.zero, table)

    def rows(self, ids: Tensor | slice) -> Planes:
        """The parts of some rows."""
        return self.of({name: tensor[ids] for name, tensor in self.tensors.items()}, self.zero, self.table)

    def nibbles(self) -> Nibbles:
        """For kernels."""
        from frame.kernels.nibbles import Nibbles

        return Nibbles(
            self.low, self.scales, self.table, high=self.high, minima=self.minima, outer=self.outer, zero=self.zero
        )


def sizes_of(kind: str, depth: int) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """(the sizes of a row, type) of each tensor of `Planes`, for K = `depth` columns."""
    high, group, _, outer, scales = SUPER[kind]
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {"low": ((depth // 8,), torch.int32)}
    if high:
        found["high"] = ((depth * high // 32,), torch.int32)
    found["scales"] = ((depth // group,), scales)
    if len(outer) > 1:
        found["minima"] = ((depth // group,), torch.uint8)
    if outer:
        found["outer"] = ((depth // 256, len(outer)), torch.float16)
    return found


def table_of(kind: str) -> Tensor | None:
    """float32 [16], what the codes of a type stand for; None for numbers from the code of zero on."""
    if kind not in TABLES:
        return None
    return torch.tensor(TABLES[kind], dtype=torch.float32) / (2 if kind == "MXFP4" else 1)


def planes_of(blocks: Tensor, kind: str) -> Planes:
    """The parts of uint8 blocks [N, blocks, bytes of a block]."""
    codes, scales, minima = codes_of(blocks, kind)
    high, _, zero, places, _ = SUPER[kind]
    codes = codes.flatten(1)
    outer = [blocks[..., at : at + 2].contiguous().view(torch.float16) for at in places]
    return Planes(
        pack_nibbles(codes & 15), _packed(codes >> 4, high) if high else None, scales.flatten(1),
        None if minima is None else minima.flatten(1), torch.cat(outer, -1) if outer else None, zero, table_of(kind),
    )  # fmt: skip


def values_of(planes: Planes, kind: str, dtype: torch.dtype = torch.float32) -> Tensor:
    """[N, K] of `dtype`, bit for bit those of the blocks."""
    high, group, zero, _, _ = SUPER[kind]
    codes = unpack_nibbles(planes.low)
    if planes.high is not None:
        shifts = torch.arange(0, 32, high, dtype=torch.int32, device=codes.device)
        codes |= ((planes.high[..., None] >> shifts) & (2**high - 1)).to(torch.uint8).flatten(1) << 4
    runs = BY_NAME[kind].values // group
    scales = half_exponents(planes.scales) if kind == "MXFP4" else planes.scales.float()
    if planes.outer is not None:
        scales = (scales.unflatten(1, (-1, runs)) * planes.outer[..., :1].float()).flatten(1)
    if planes.table is None:
        numbers = codes.float() - zero
    else:  # what of MXFP4 is halved for kernels is doubled again, so that no scale is too large
        numbers = planes.table[codes.int()] * (2 if kind == "MXFP4" else 1)
    weight: Tensor = numbers.unflatten(1, (-1, group)) * scales[..., None]
    if planes.minima is not None and planes.outer is not None:
        minima = (planes.minima.float().unflatten(1, (-1, runs)) * planes.outer[..., 1:].float()).flatten(1)
        weight -= minima[..., None]
    return weight.flatten(1).to(dtype)


def _packed(codes: Tensor, bits: int) -> Tensor:
    """Codes of `bits` uint8 [N, K] as int32 [N, K · bits / 32], the first in the lowest bits."""
    per = 32 // bits
    words = torch.zeros((len(codes), codes.shape[1] // per), dtype=torch.int32, device=codes.device)
    for place in range(per):
        words |= codes[:, place::per].to(torch.int32) << (bits * place)
    return words
