"""Which products with nibbles `nibbles_hopper` takes, where it is the quicker one, and by tiles of which sizes."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from .halves import CHUNK, MOST_ROWS, room_for

#: Groups of columns that are smaller than a chunk, by which codes are copied; others are whole chunks.
SMALL_GROUPS = (32, 64)
#: The warpgroups that multiply, and outputs of a matrix instruction.
WARPGROUPS, _OUTPUTS = 2, 64
#: Shared memory of the steps on their way; from so many outputs on tiles are wide; steps that sharing a tile costs.
_RING_BYTES, _WIDE_OUTPUTS, _SHARED_STEPS = 192 << 10, 1 << 14, 6
#: Elements of a large weight; weights of few inputs and so many outputs, too, are multiplied quickly.
_LARGE, _SHORT_DEPTH, _LEAST_SHORT_OUTPUTS = 72 << 20, 1024, 4096


@dataclass(frozen=True)
class NibbleTile:
    """Sizes of a program: 64 outputs of a warpgroup once or twice, chunks of a step, steps on their way.

    With `whole`, no tile is shared by programs.
    """

    own: int
    chunks: int
    stages: int
    whole: bool = False

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return WARPGROUPS * _OUTPUTS * self.own


def fits(codes: Tensor, scales: Tensor, block: tuple[int, int], zeros: Tensor | None, rows: int) -> bool:
    """Whether `nibbles_hopper` takes the weight and the rows: whole chunks of nibbles, groups of 32, 64 or chunks."""
    depth = codes.shape[-1] * 8
    return (
        0 < rows <= MOST_ROWS
        and codes.dtype == torch.int32
        and codes.dim() == 2
        and codes.is_contiguous()
        and codes.data_ptr() % 16 == 0
        and depth % CHUNK == 0
        and scales.is_contiguous()
        and (zeros is None or zeros.is_contiguous())
        and block[0] == 1
        and (block[1] in SMALL_GROUPS or block[1] % CHUNK == 0)
        and block[1] * scales.shape[-1] == depth
    )


def tile_for(outputs: int, depth: int, rows: int, width: int, programs: int) -> NibbleTile:
    """The tile that suits a product, of groups that let `width` columns be added up, on so many multiprocessors.

    Measured on an H200 (`benchmarks/kernels/nibbles_sweep.py`): wide tiles read the halves less often; sharing tiles
    costs what `_SHARED_STEPS` steps take.
    """
    own = 2 if rows > 32 and outputs >= _WIDE_OUTPUTS and width == CHUNK else 1
    chunks = 2 if own == 1 and width == CHUNK else 1
    tile = NibbleTile(own, chunks, min(12, _RING_BYTES // (chunks * chunk_bytes(own, room_for(rows)))))
    tiles, steps = triton.cdiv(outputs, tile.outputs), triton.cdiv(depth, CHUNK * chunks)
    whole = triton.cdiv(tiles, programs) * steps <= tiles * steps / programs + _SHARED_STEPS
    return replace(tile, whole=whole)


def pays(outputs: int, depth: int, rows: int) -> bool:
    """Whether `nibbles_hopper.product` is quicker than the kernels that decode to 16 bits: for large weights.

    Measured on an H200 for 9 to 64 rows (`benchmarks/kernels/nibbles_sweep.py`).
    """
    size = outputs * depth
    if rows > 16 and outputs >= _LEAST_SHORT_OUTPUTS and depth <= _SHORT_DEPTH:
        return True
    return size >= _LARGE or (size >= _LARGE * 3 // 4 and (rows > 16 or outputs > depth))


def chunk_bytes(own: int, room: int) -> int:
    """Shared memory for a chunk of codes and of the halves of x."""
    return WARPGROUPS * _OUTPUTS * own * CHUNK // 2 + 2 * room * CHUNK
