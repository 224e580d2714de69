"""The invariant product against its reference and against itself: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from frame.core.ops import layers as reference
from frame.kernels import linear_hopper
from frame.kernels.activation import silu_mul
from frame.kernels.linear_hopper import HopperTile
from frame.kernels.linear_invariant import (
    CANDIDATES,
    TILES,
    Tile,
    linear_invariant,
    linear_silu_mul_invariant,
    tile_for,
    tiled_product,
)
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
#: (outputs, inputs); on a GPU those of an 8B model and some that no tile divides
SHAPES = (
    [(96, 64), (40, 100)]
    if INTERPRETED
    else [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288), (1000, 520), (151, 96), (333, 77)]
)
ROWS = [*range(1, 301), 512, 1100, 8192]
HOPPER_TILES = tuple(dict.fromkeys((*linear_hopper.TILES.values(), *linear_hopper.CANDIDATES)))
hopper = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="Gluon kernels are not interpreted, and this one is for Hopper",
)


def inputs(rows: int, outputs: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias whose product is of size one."""
    draw = torch.Generator().manual_seed(outputs)
    shapes = (rows, depth), (outputs, depth), (outputs,)
    x, weight, bias = (torch.randn(shape, generator=draw).to(DEVICE, dtype) for shape in shapes)
    return x, weight / depth**0.5, bias


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_product_equals_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for rows in (1, 70, 150):
        x, weight, bias = inputs(rows, *shape, dtype)
        for given in (None, bias):
            found = linear_invariant(x, weight, given)
            wide = reference.linear(x.double(), weight.double(), None if given is None else given.double())
            assert found.dtype == dtype
            assert (found.double() - wide).norm() <= CLOSE[dtype] * wide.norm()


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's product is a library's, whose bits follow a row's place")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits_do_not_depend_on_the_number_of_rows(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight, bias = inputs(max(ROWS), *shape, dtype)
    whole = linear_invariant(x, weight, bias)
    for rows in ROWS:
        first = max(0, len(x) - rows) // 2
        assert torch.equal(linear_invariant(x[first : first + rows], weight, bias), whole[first : first + rows]), rows


@pytest.mark.parametrize(
    "tile", CANDIDATES[:2] if INTERPRETED else [*CANDIDATES, *(tile for _, tile in TILES)], ids=str
)
def test_no_tile_changes_a_bit(tile: Tile) -> None:
    dtype = torch.float16 if INTERPRETED else torch.bfloat16
    x, weight, _ = inputs(130, 96, 200, dtype) if INTERPRETED else inputs(1100, 1536, 4096, dtype)
    found, other = tiled_product(x, weight, tile=tile), tiled_product(x, weight, tile=TILES[0][1])
    assert torch.equal(found, other) or (INTERPRETED and torch.allclose(found, other, atol=0.1))


def in_tile(tile: HopperTile) -> Iterator[tuple[object, Tensor, Tensor]]:
    """(sizes, the product in that tile, in Triton) for sizes that fit tiles and others, plain and gated."""
    for rows, outputs, depth, dtype in (
        (1, 16, 8, torch.bfloat16),
        (129, 1008, 520, torch.float16),
        (200, 144, 200, torch.bfloat16),
        (2100, 6144, 1024, torch.bfloat16),
    ):
        x, weight, bias = inputs(rows, outputs, depth, dtype)
        given = bias if dtype == torch.float16 else None
        twin = tiled_product(x, weight, given)
        yield (rows, outputs), linear_hopper.product(x, weight, given, tile), twin
        if tile.block_n > 64:
            yield (rows, outputs, "gated"), linear_hopper.product(x, weight, given, tile, gated=True), silu_mul(twin)


@pytest.fixture(scope="module")
def compiled() -> None:
    """Every kernel of the next test, many at a time: one after another they take minutes."""

    def launch() -> None:
        for tile in HOPPER_TILES:
            for _ in in_tile(tile):
                pass

    rehearse(launch)


@hopper
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("tile", HOPPER_TILES, ids=str)
def test_no_tile_for_hopper_changes_a_bit(tile: HopperTile) -> None:
    for sizes, found, twin in in_tile(tile):
        assert torch.equal(found, twin), sizes


@pytest.mark.parametrize("given", [False, True], ids=["plain", "bias"])
def test_the_gated_product_is_the_product_and_its_gate(given: bool) -> None:
    shape = (96, 64) if INTERPRETED else (8192, 1024)
    for dtype in DTYPES[1:]:
        x, weight, bias = inputs(20 if INTERPRETED else 1100, *shape, dtype)
        offered = bias if given else None
        whole = linear_silu_mul_invariant(x, weight, offered)
        assert torch.equal(whole, silu_mul(linear_invariant(x, weight, offered)))
        for rows in (1, 17) if INTERPRETED else (1, 64, 128, 129, 300, 512):
            part = linear_silu_mul_invariant(x[-rows:], weight, offered)
            assert INTERPRETED or torch.equal(part, whole[-rows:]), rows


@pytest.mark.parametrize("rows", [12] if INTERPRETED else [12, 300])
def test_other_layouts(rows: int) -> None:
    x, weight, _ = inputs(rows, 40, 64, torch.float16)
    want = linear_invariant(x, weight)
    assert torch.equal(linear_invariant(x.view(3, rows // 3, 64), weight), want.view(3, rows // 3, 40))
    spread = torch.cat((x, x), 1)
    assert torch.equal(linear_invariant(spread[:, :64], weight), want)
    assert torch.equal(linear_invariant(x.t().contiguous().t(), weight), want)
    assert linear_invariant(x[:0], weight).shape == (0, 40)


def test_tiles_are_narrower_where_there_are_few() -> None:
    assert tile_for(1, 4096, 132).block_n == 32
    assert tile_for(8192, 4096, 132) == TILES[-1][1]
    assert {tile.block_m for _, tile in TILES} >= {64}
    assert all(tile.block_m >= 64 for tile in (*CANDIDATES, *(tile for _, tile in TILES)))
    assert linear_hopper.tile_for(8192, 28672, 132).block_n == 256
    assert linear_hopper.tile_for(256, 4096, 132).block_n == 64
    assert linear_hopper.tile_for(256, 4096, 132, 128).block_n == 128
    assert all(tile.shared_bytes + 1024 <= 227 << 10 for tile in HOPPER_TILES)
