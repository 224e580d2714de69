"""Tile sizes of the experts' products: a measured table per chip and shape, and a rule for everything else.

The table, `experts.json` beside this file, is written by `benchmarks/kernels/experts.py --tune`. Knows no tensor.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from math import log
from pathlib import Path
from typing import Any

import torch


@dataclass(frozen=True)
class Tile:
    """One product's tile: weight rows, depth of a step, pipeline.

    `swap` puts the weights on the side that the matrix unit has most rows for; `copier` lets the chip's copy engine
    fetch them (a Hopper or later chip, matrices whose rows are multiples of 16 bytes).
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int = 1
    swap: bool = False
    copier: bool = False


@dataclass(frozen=True)
class Launch:
    """How a batch is multiplied: `block_m` pairs a block, all of one expert; 0 multiplies each pair by itself."""

    block_m: int
    gate_up: Tile
    down: Tile


@dataclass(frozen=True)
class Shape:
    """The experts of a layer: how many tokens choose from, on all ranks, how many a token has, sizes, weights' type.

    A rank that holds some of them launches what one with all of them does, as its experts have as many rows.
    """

    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    dtype: torch.dtype

    @property
    def name(self) -> str:
        """The shape's key in the table."""
        sizes = f"{self.num_experts} experts, top {self.top_k}, {self.hidden_size} x {self.intermediate_size}"
        return f"{sizes}, {str(self.dtype).removeprefix('torch.')}"


@dataclass(frozen=True)
class Chip:
    """What tile sizes depend on: the chip's name in the table, and the shared memory that one program may use.

    `copies` says that it has a copy engine, as from Hopper on; without one, Triton's stand-in for it needs far more
    registers than there are.
    """

    name: str = ""
    shared_bytes: int = 227 << 10
    copies: bool = True


ANY_CHIP = Chip()
#: Outputs of all pairs from which tiles of 64 are as many as a Hopper chip has multiprocessors.
_WIDE = 64 * 132
#: Rows that experts must have on average for `experts_hopper`: with fewer, its blocks of 128 are half empty.
MANY_ROWS = 128


@lru_cache(maxsize=1024)
def launch_for(shape: Shape, num_tokens: int, chip: Chip = ANY_CHIP) -> Launch:
    """The launch for a batch: that of the nearest measured token count, or by rule where the table lacks the shape."""
    measured = read_table().get(chip.name, {}).get(shape.name)
    if not measured:
        return rule(shape, num_tokens, chip)
    nearest = min(measured, key=lambda tokens: abs(log(int(tokens) / num_tokens)))
    return launch_from(measured[nearest])


def rule(shape: Shape, num_tokens: int, chip: Chip = ANY_CHIP) -> Launch:
    """Tile sizes from the mean number of rows an expert gets."""
    pairs = num_tokens * shape.top_k
    if pairs <= max(shape.top_k, shape.num_experts // 4):
        return vector_launch(shape)
    if shape.dtype.itemsize > 2:
        return invariant_launch(shape, chip)
    rows = pairs / shape.num_experts
    if rows <= 12:
        launch = Launch(16, Tile(64, 128, 4, 3, True, True), Tile(128, 128, 4, 3, True, True))
    elif rows <= 24:
        launch = Launch(32, Tile(128, 128, 8, 3, False, True), Tile(64, 128, 4, 3, True, True))
    elif rows <= 48:
        launch = Launch(64, Tile(128, 64, 8, 4, False, True), Tile(128, 64, 4, 3))
    else:
        launch = Launch(128, Tile(128, 64, 8, 4, False, True), Tile(256, 64, 8, 4, False, True))
    return _fit(shape, launch, chip)


def many_rows(shape: Shape, num_tokens: int) -> bool:
    """Whether `experts_hopper` is meant for such a batch: 16-bit experts with sizes of whole steps and many rows each.

    All counts of tokens from a power of two to the next are decided alike, as that is what a warm-up meets.
    """
    pairs = (1 << num_tokens.bit_length() >> 1) * shape.top_k
    fits = shape.dtype.itemsize == 2 and shape.hidden_size % 64 == 0 and shape.intermediate_size % 64 == 0
    return fits and pairs >= MANY_ROWS * shape.num_experts


def vector_launch(shape: Shape) -> Launch:
    """A matrix-vector product a pair, in tiles small enough to fill the chip from one token."""
    gate_up, down = min(1024, _power(shape.hidden_size)), min(512, _power(shape.intermediate_size))
    return Launch(0, Tile(2, gate_up, 2), Tile(2, down, 2))


def invariant_launch(shape: Shape, chip: Chip = ANY_CHIP) -> Launch:
    """One launch for every batch: a row's sums run over the depth in one order, whatever is beside it."""
    if shape.dtype.itemsize > 2:
        return _fit(shape, Launch(16, Tile(32, 32, 4, 2), Tile(32, 32, 4, 2)), chip)
    return _fit(shape, Launch(32, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)), chip)


@lru_cache(maxsize=1024)
def coded_launch(shape: Shape, num_tokens: int, chip: Chip = ANY_CHIP, *, apart: bool = False) -> Launch:
    """Tile sizes of experts whose weights are codes, for 16-bit tokens; of no tokens: one launch for every batch.

    Weights take a quarter or half of the bytes of `rule`'s and some instructions each, so that few rows have tiles
    of which several share a multiprocessor, and many rows tall ones, for which codes are read less often.
    Where sums of a step stay `apart` tiles are smaller, as they take registers twice. Counts of tokens from a power of
    two to the next are decided alike, as in `many_rows`. No GPU has timed these tiles.
    """
    num_tokens = 1 << num_tokens.bit_length() >> 1
    pairs, rows = num_tokens * shape.top_k, num_tokens * shape.top_k / shape.num_experts
    if num_tokens == 0:
        launch = Launch(32, Tile(64, 64, 4, 3), Tile(64, 64, 4, 3))
    elif pairs <= max(shape.top_k, shape.num_experts // 4):
        sizes = shape.intermediate_size, shape.hidden_size
        launch = Launch(
            0, *(Tile(64, 128, 4, 4, True) if pairs * size >= _WIDE else Tile(32, 128, 4, 4) for size in sizes)
        )
    elif rows <= 12:
        launch = Launch(16, Tile(64, 128, 4, 4, True), Tile(64, 128, 4, 4, True))
    elif rows <= 24:
        launch = Launch(32, Tile(64, 128, 4, 4, True), Tile(64, 128, 4, 4, True))
    elif apart:
        launch = Launch(64, Tile(64, 128, 8, 3), Tile(128, 128, 8, 3))
    elif rows <= 96:
        launch = Launch(64, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4))
    else:
        launch = Launch(128, Tile(64, 64, 8, 4), Tile(128, 64, 8, 4))
    return _fit(shape, launch, chip)


@lru_cache(maxsize=1)
def read_table() -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
    """Chip → shape → number of tokens → launch; empty when there is no table."""
    path = Path(__file__).with_name("experts.json")
    return json.loads(path.read_text()) if path.is_file() else {}


def launch_from(entry: Mapping[str, Any]) -> Launch:
    """The launch of one table entry; a field that is missing or unknown is a TypeError."""
    sizes = dict(entry)
    return Launch(gate_up=Tile(**sizes.pop("gate_up")), down=Tile(**sizes.pop("down")), **sizes)


def entry_of(launch: Launch) -> dict[str, Any]:
    """The table entry of a launch."""
    return asdict(launch)


def _fit(shape: Shape, launch: Launch, chip: Chip) -> Launch:
    """Tiles no larger than the matrices and the chip's shared memory, nor smaller than what a matrix unit takes."""
    size, hidden, inner = shape.dtype.itemsize, shape.hidden_size, shape.intermediate_size
    gate_up = _shrink(_clip(launch.gate_up, inner, hidden, size, chip), launch.block_m, 2, size, chip)
    down = _shrink(_clip(launch.down, hidden, inner, size, chip), launch.block_m, 1, size, chip)
    return Launch(launch.block_m, gate_up, down)


def _clip(tile: Tile, size: int, depth: int, itemsize: int, chip: Chip) -> Tile:
    narrow, shallow = max(16, _power(size)), max(16, _power(depth))
    copier = tile.copier and chip.copies and depth * itemsize % 16 == 0
    return replace(tile, block_n=min(tile.block_n, narrow), block_k=min(tile.block_k, shallow), copier=copier)


def _shrink(tile: Tile, block_m: int, matrices: int, itemsize: int, chip: Chip) -> Tile:
    """Fewer steps in flight, then shorter ones, until what is in flight fits beside a KiB for barriers."""
    while tile.num_stages * (block_m + matrices * tile.block_n) * tile.block_k * itemsize > chip.shared_bytes - 1024:
        if tile.num_stages > 2:
            tile = replace(tile, num_stages=tile.num_stages - 1)
        elif tile.block_k > 16:
            tile = replace(tile, block_k=tile.block_k // 2)
        else:
            break
    return tile


def _power(size: int) -> int:
    return 1 << (size - 1).bit_length()
