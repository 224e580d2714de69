"""How the weights of each type of blocks lie on a device, taken apart so that products read the codes where they can.

Blocks of Q8_0 and Q4_0 become the codes and scales of other formats, those of Q4_K, Q5_K, Q6_K, IQ4_NL, IQ4_XS and
MXFP4 `Planes`; all others stay as they are in the file. What is looked up or put together is bit for bit what blocks
hold.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from frame.kernels.native.nibbles import NibbleWeight
from frame.kernels.native.rows import NativeRows
from frame.ops import unpack_nibbles

from ..quantization.packing import pack_nibbles
from .blocks import TABLES, codes_and_scale, dequantize
from .superblocks import SUPER, Planes, planes_of, sizes_of, table_of, values_of
from .types import BY_NAME

#: Values that are put together at once of a weight: as many as memory spares, or as stay in a processor's cache.
_AT_ONCE, _IN_CACHE = 1 << 25, 1 << 19
#: The most rows that platforms multiply without putting the weight together: a GPU, and a processor.
_FEW_ROWS, _FEW_HOST_ROWS = 64, 16
#: What bytes of made-up blocks are near: as the two bytes of a float16 scale they are about a thousandth. Scales of
#: IQ4_XS are multiplied by an integer, and those of MXFP4 are exponents.
_NEAR, _OTHERS_NEAR = (20.0, 4.0), {"IQ4_XS": (4.0, 2.0), "MXFP4": (118.0, 2.0)}
#: Columns of a block of Q8_0 or Q4_0, and the code of zero of the latter.
_GROUP, _ZERO = 32, 8


class Held(ABC):
    """The weight [rows, K] of a layer, as parameters of the layer."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self.near = _OTHERS_NEAR.get(kind, _NEAR)

    @abstractmethod
    def create(self, layer: Any, rows: int, depth: int) -> list[Tensor]:
        """Gives `layer` its parameters, and returns them; rows of zeros are zero."""

    @abstractmethod
    def put(self, layer: Any, rows: slice, piece: Tensor) -> None:
        """Takes blocks uint8 [some rows, blocks, bytes] of a file."""

    @abstractmethod
    def values(self, layer: Any, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        """[some rows, K] of `dtype`."""

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + b."""
        if x.device.type == "cpu" and not layer.ops.invariant:
            return self._widened(layer, x, bias)
        return self._in_parts(layer, x, bias, lambda rows: self.values(layer, rows, x.dtype))

    def _in_parts(self, layer: Any, x: Tensor, bias: Tensor | None, weight: Callable[[slice], Tensor]) -> Tensor:
        """x Wᵀ + b, W being put together some rows after the other, so that little of it is there at once."""
        count, most = self._rows(layer), _IN_CACHE if x.device.type == "cpu" else _AT_ONCE
        step = max(1, most // x.shape[-1])
        parts = [slice(first, min(first + step, count)) for first in range(0, count, step)]
        found = [layer.ops.linear(x, weight(rows), None if bias is None else bias[rows]) for rows in parts]
        return found[0] if len(found) == 1 else torch.cat(found, -1)

    def _widened(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """As `apply`, in float32: on a processor that costs less than rounding the weight to 16 bits."""
        wide = None if bias is None else bias.float()
        out = self._in_parts(layer, x.float(), wide, lambda rows: self.values(layer, rows, torch.float32))
        return out.to(x.dtype)

    @abstractmethod
    def _rows(self, layer: Any) -> int:
        """How many rows there are."""


class HeldBlocks(Held):
    """`layer.blocks` uint8 [rows, blocks of a row, bytes of a block], as in the file."""

    def create(self, layer: Any, rows: int, depth: int) -> list[Tensor]:
        block = BY_NAME[self.kind]
        layer.blocks = layer.empty(rows, depth // block.values, block.num_bytes, dtype=torch.uint8)
        return [layer.blocks]

    def put(self, layer: Any, rows: slice, piece: Tensor) -> None:
        layer.blocks.data[rows] = piece

    def values(self, layer: Any, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return dequantize(layer.blocks[rows], self.kind, dtype)

    def _rows(self, layer: Any) -> int:
        return len(layer.blocks)


class HeldCodes(Held):
    """`layer.codes` int8 [rows, K] of Q8_0 or int32 [rows, K / 8] of Q4_0, float16 `layer.scales` [rows, K / 32]."""

    def create(self, layer: Any, rows: int, depth: int) -> list[Tensor]:
        wide = self.kind == "Q8_0"
        layer.codes = layer.empty(rows, depth if wide else depth // 8, dtype=torch.int8 if wide else torch.int32)
        layer.scales = layer.empty(rows, depth // _GROUP, dtype=torch.float16)
        return [layer.codes, layer.scales]

    def put(self, layer: Any, rows: slice, piece: Tensor) -> None:
        codes, scales = codes_and_scale(piece, self.kind)
        codes = codes.flatten(1)
        layer.codes.data[rows] = codes if self.kind == "Q8_0" else pack_nibbles(codes)
        layer.scales.data[rows] = scales.flatten(1)

    def values(self, layer: Any, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        codes, scales = layer.codes[rows], layer.scales[rows]
        wide = codes.float() if self.kind == "Q8_0" else unpack_nibbles(codes).float().sub_(_ZERO)
        found: Tensor = wide.unflatten(-1, (-1, _GROUP)).mul_(scales.float()[..., None]).flatten(-2)
        return found.to(dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        host = x.device.type == "cpu"
        many = x.numel() > (_FEW_HOST_ROWS if host else _FEW_ROWS) * x.shape[-1] or layer.ops.invariant
        if many and (host or layer.scales.numel() * _GROUP > _AT_ONCE):
            return super().apply(layer, x, bias)
        if self.kind == "Q8_0":
            wide: Tensor = layer.ops.scaled_linear(x, layer.codes, layer.scales, (1, _GROUP), bias)
            return wide
        out: Tensor = layer.ops.packed_linear(x, layer.codes, layer.scales, None, bias)
        return out

    def _rows(self, layer: Any) -> int:
        return len(layer.scales)


class HeldPlanes(Held):
    """The tensors of `Planes`, each a parameter "layer.plane_NAME"."""

    def create(self, layer: Any, rows: int, depth: int) -> list[Tensor]:
        made = []
        for name, (size, dtype) in sizes_of(self.kind, depth).items():
            parameter = layer.empty(rows, *size, dtype=dtype)
            setattr(layer, f"plane_{name}", parameter)
            made.append(parameter)
        if (table := table_of(self.kind)) is not None:
            layer.plane_table = layer.empty(len(table), dtype=table.dtype)
            layer.plane_table.data.copy_(table)
        return made

    def put(self, layer: Any, rows: slice, piece: Tensor) -> None:
        for name, tensor in planes_of(piece, self.kind).tensors.items():
            getattr(layer, f"plane_{name}").data[rows] = tensor
        if (table := table_of(self.kind)) is not None:  # which sleep may have dropped
            layer.plane_table.data.copy_(table)

    def values(self, layer: Any, rows: slice | Tensor, dtype: torch.dtype) -> Tensor:
        return values_of(self._planes(layer).rows(rows), self.kind, dtype)

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None) -> Tensor:
        """From the codes, by kernels: of few rows the product, on a GPU of more the weight in one launch."""
        if (found := self._native(layer, x)) is not None:
            return found if bias is None else found.add_(bias)
        if x.device.type != "cuda" or x.dtype.itemsize != 2 or x.dim() != 2 or x.stride(1) != 1 or not len(x):
            return super().apply(layer, x, bias)
        from frame.kernels import codebook, nibble_rows

        if len(x) <= _FEW_ROWS and not layer.ops.invariant:
            return nibble_rows.product(x, self._planes(layer).nibbles(), bias)
        planes = self._planes(layer)
        return self._in_parts(layer, x, bias, lambda rows: codebook.dequantize(planes.rows(rows).nibbles(), x.dtype))

    def _native(self, layer: Any, x: Tensor) -> Tensor | None:
        """x Wᵀ by the kernels in C of the CPU platform, which takes few rows."""
        native: NativeRows | None = getattr(layer.ops, "native", None)
        if native is None or self.kind in TABLES or x.device.type != "cpu" or layer.ops.invariant or not x.numel():
            return None
        planes = self._planes(layer)
        weight = NibbleWeight(
            planes.low, planes.scales, planes.high, minima=planes.minima, outer=planes.outer, zero=planes.zero
        )
        return native.nibble_linear(x, weight) if weight.fits else None

    def _planes(self, layer: Any) -> Planes:
        names = sizes_of(self.kind, 0)
        table = layer.plane_table if self.kind in TABLES else None
        return Planes.of({name: getattr(layer, f"plane_{name}") for name in names}, SUPER[self.kind].zero, table)

    def _rows(self, layer: Any) -> int:
        return len(layer.plane_low)


def held_as(kind: str) -> Held:
    """How weights of a type are held."""
    if kind in SUPER:
        return HeldPlanes(kind)
    return HeldCodes(kind) if kind in ("Q8_0", "Q4_0") else HeldBlocks(kind)
