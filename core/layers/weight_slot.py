"""`WeightSlot`: a checkpoint tensor, the piece of it that a rank takes, and the parameter that it fills."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from ..interfaces.quantization import LinearSpec

Index = tuple[slice, ...]


@dataclass(frozen=True)
class WeightSlot:
    """One checkpoint tensor (or a piece of it) and the region of a parameter that it fills.

    `shape` is the whole tensor's in the checkpoint and `index` the piece of it that this rank takes. The piece, its
    last two axes swapped when `transposed`, is copied into `parameter[region]`. A slot without parameter is a tensor
    that may be present and is not read; an `optional` one may be missing. The empty shape is a single number, however
    it is stored. A fused tensor names in `covers` the tensors that it stands for. One whose parameter is on the meta
    device belongs to another pipeline stage: its tensor must be there and is not read.

    The tensor must be of `dtype`; without it floating-point numbers of two bytes or more are cast to the parameter's
    type, and others must be of it. `take` is given the piece, on the parameter's device and of the stored type, in
    place of the copy. `near` is (center, reach) of the values that stand for those of a checkpoint where there is none.
    A slot with `beside` is filled, in place of others of its name, where that tensor of the checkpoint has that shape.
    """

    name: str
    shape: tuple[int, ...]
    parameter: Tensor | None
    index: Index = ()
    region: Index = ()
    transposed: bool = False
    covers: tuple[str, ...] = ()
    optional: bool = False
    dtype: torch.dtype | None = None
    take: Callable[[Tensor], object] | None = None
    near: tuple[float, float] | None = None
    beside: tuple[str, tuple[int, ...]] | None = None

    @classmethod
    def sharded(
        cls,
        name: str,
        parameter: Tensor,
        spec: LinearSpec,
        rows_per: int = 1,
        columns_per: int | None = 1,
        *,
        transposed: bool = False,
        **options: Any,
    ) -> list[WeightSlot]:
        """One slot for each run of rows of a linear layer, for its tensor "PART.name" of units.

        A unit stands for `rows_per` rows and `columns_per` columns, the last one perhaps for fewer; 0 is one unit for
        all, which every rank takes, and None for `columns_per` a tensor without columns. `parameter` holds this rank's
        units, one run after the other; the checkpoint stores them as [columns, rows] if `transposed`. `options` are
        further fields of the slots. Raises `ValueError` where this rank's share cuts a unit.
        """
        slots: list[WeightSlot] = []
        offset = 0
        for part in spec.rows:
            where = f"{part.name}.{name}"
            taken, size = _units(f"{where}: rows", part.start, part.count, part.total, rows_per)
            region = (slice(offset, offset + taken.stop - taken.start),)
            offset = region[0].stop
            shape: tuple[int, ...] = (size,)
            index: Index = (taken,)
            if columns_per is not None:
                columns, width = _units(
                    f"{where}: columns", spec.columns.start, spec.width, spec.in_features, columns_per
                )
                shape, index = ((width, size), (columns, taken)) if transposed else ((size, width), (taken, columns))
            slots.append(cls(where, shape, parameter, index, region, transposed=transposed, **options))
        return slots

    @property
    def is_read(self) -> bool:
        """Whether this rank reads the tensor."""
        return self.parameter is not None and not self.parameter.is_meta

    def has_shape(self, shape: Sequence[int]) -> bool:
        """Whether a checkpoint tensor of this shape may fill the slot; a scalar may also come as one of one element."""
        return tuple(shape) == self.shape or (self.shape == () and tuple(shape) == (1,))

    def misfit(self, name: str, shape: Sequence[int], dtype: torch.dtype) -> str:
        """Why a checkpoint tensor may not fill this slot, or ""."""
        if self.parameter is None:
            return ""
        if not self.has_shape(shape):
            return f"{name} is {list(shape)}, expected {list(self.shape)}"
        wanted = self.dtype or self.parameter.dtype
        is_cast = self.dtype is None and (self.take is not None or wanted.is_floating_point) and _is_wide(dtype)
        return "" if dtype == wanted or is_cast else f"{name} is {_plain(dtype)}, expected {_plain(wanted)}"

    def target(self, parameter: Tensor) -> Tensor:
        """The region that the piece fills, its axes in the order of the checkpoint's."""
        region: Tensor = parameter.data[self.region] if self.region else parameter.data
        return region.transpose(-1, -2) if self.transposed else region

    def place(self, dtype: torch.dtype) -> Tensor:
        """Where the piece is copied to: the region, or a new tensor of `dtype` for what `take` will be given."""
        if self.parameter is None:
            raise ValueError(f"{self.name} is not read")
        if self.take is None:
            return self.target(self.parameter)
        sizes = [len(range(size)[places]) for size, places in zip(self.shape, self.index or (), strict=False)]
        sizes += self.shape[len(sizes) :]
        return torch.empty(sizes, dtype=dtype, device=self.parameter.device)

    def write(self, piece: Tensor) -> None:
        """Copies `piece` (already cut to `index`) into place, or hands it to `take`."""
        if self.parameter is not None and self.take is not None:
            self.take(piece.to(self.parameter.device))
        elif self.parameter is not None:
            self.target(self.parameter).copy_(piece)


def _units(what: str, start: int, count: int, total: int, per: int) -> tuple[slice, int]:
    """(the units of elements `start` to `start` + `count`, all units) where one stands for `per` elements, 0: for all.

    Raises `ValueError` where they cut a unit.
    """
    if not per:
        return slice(0, 1), 1
    stop = start + count
    if start % per or (stop % per and stop != total):
        raise ValueError(
            f"{what} {start} to {stop} of {total}, which this rank holds, cut a unit of {per}; "
            "divide the model over fewer devices"
        )
    return slice(start // per, -(-stop // per)), -(-total // per)


def _is_wide(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point and dtype.itemsize > 1


def _plain(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
