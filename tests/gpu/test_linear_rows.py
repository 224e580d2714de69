"""Products of 2 to 16 rows on Hopper against the reference and their twin, which test_linear_invariant interprets."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from frame.core.ops import Ops
from frame.kernels import linear_rows
from frame.kernels.activation import silu_mul
from frame.kernels.linear_invariant import linear_invariant, tiled_product
from frame.kernels.linear_rows import RowsTile
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse
from frame.plugins.platforms.cuda.ops import CudaOps

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        os.environ.get("TRITON_INTERPRET") == "1"
        or not torch.cuda.is_available()
        or torch.cuda.get_device_capability() != (9, 0),
        reason="Gluon kernels are not interpreted, and this one is for Hopper",
    ),
]
DTYPES = [torch.bfloat16, torch.float16]
#: What is rounded once; a lost input of a thousand would show.
CLOSE = {torch.bfloat16: 8e-3, torch.float16: 1e-3}
#: (outputs of the weight, inputs): of layers; then some whose ends fit no program or no step.
SHAPES = [(4096, 1024), (5120, 2048), (128, 4096), (6144, 1024), (1000, 1088), (9000, 576), (34, 128), (2, 64)]


def inputs(rows: int, outputs: int, depth: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """x, weight and bias whose product is of size one; what lies around the first two is no number."""
    draw = torch.Generator().manual_seed(outputs + rows)
    x, weight, bias = (torch.randn(shape, generator=draw) for shape in ((rows, depth), (outputs, depth), (outputs,)))
    return among_nan(x.to(dtype)), among_nan((weight / depth**0.5).to(dtype)), bias.to("cuda", dtype)


def among_nan(matrix: Tensor) -> Tensor:
    rows, columns = matrix.shape
    around = torch.full((rows + 20, columns + 32), float("nan"), dtype=matrix.dtype, device="cuda")
    around[:rows, :columns] = matrix
    return around[:rows, :columns]


def error(found: Tensor, expected: Tensor) -> float:
    return float((found.double() - expected.double()).norm() / expected.double().norm())


@pytest.fixture(scope="module")
def compiled() -> None:
    """Every kernel of the next test, many at a time."""

    def launch() -> None:
        for dtype in DTYPES:
            for outputs, depth in SHAPES:
                for rows in (8, 16):
                    x, weight, bias = inputs(rows, outputs, depth, dtype)
                    for gated in (False, True):
                        for given in (None, bias):
                            linear_rows.product(x, weight, given, gated=gated)
        for outputs, depth in SHAPES:
            x, weight, bias = inputs(7, outputs, depth, torch.bfloat16)
            for tile in linear_rows.CANDIDATES:
                for gated in (False, True):
                    linear_rows.product(x, weight, None, tile, gated=gated)

    rehearse(launch)


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_products_equal_the_reference(shape: tuple[int, int], dtype: torch.dtype) -> None:
    for rows in (2, 5, 8, 9, 16):
        x, weight, bias = inputs(rows, *shape, dtype)
        for given in (None, bias):
            wide = x.double(), weight.double(), None if given is None else given.double()
            found = linear_rows.product(x, weight, given)
            assert found.shape == (rows, shape[0])
            assert error(found, Ops().linear(*wide)) < CLOSE[dtype], rows
            assert error(found, tiled_product(x, weight, given)) < CLOSE[dtype], rows
            gated = linear_rows.product(x, weight, given, gated=True)
            assert gated.shape == (rows, shape[0] // 2)
            assert error(gated, Ops().linear_silu_mul(*wide)) < 2 * CLOSE[dtype], rows
            assert error(gated, silu_mul(found)) < 2 * CLOSE[dtype], rows


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("tile", linear_rows.CANDIDATES, ids=str)
def test_every_tile(tile: RowsTile) -> None:
    for outputs, depth in SHAPES:
        x, weight, _ = inputs(7, outputs, depth, torch.bfloat16)
        expected = tiled_product(x, weight)
        assert error(linear_rows.product(x, weight, None, tile), expected) < 2 * CLOSE[torch.bfloat16]
        gated = linear_rows.product(x, weight, None, tile, gated=True)
        assert error(gated, silu_mul(expected)) < 2 * CLOSE[torch.bfloat16]


def test_more_rows_are_refused() -> None:
    with pytest.raises(ValueError, match="x has 17 rows; the kernel serves up to 16"):
        linear_rows.product(*inputs(17, 64, 64, torch.bfloat16)[:2])


def test_each_product_of_a_captured_chain_waits_for_the_one_before() -> None:
    """They begin early, and may read weights only."""
    depth = 2048
    weights = [inputs(8, depth, depth, torch.bfloat16)[1] for _ in range(6)]
    gates = inputs(8, 2 * depth, depth, torch.bfloat16)[1]

    def chain(x: Tensor) -> list[Tensor]:
        found = [linear_rows.product(x, gates, gated=True)]
        for weight in weights:
            found.append(linear_rows.product(found[-1], weight))
        return found

    given = torch.zeros(8, depth, dtype=torch.bfloat16, device="cuda")
    chain(given)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = chain(given)
    for number in range(50):
        given.copy_(torch.randn(8, depth, generator=torch.Generator().manual_seed(number)))
        graph.replay()
        torch.cuda.synchronize()
        before = given
        for index, (weight, one) in enumerate(zip([gates, *weights], found, strict=True)):
            again = linear_rows.product(before, weight, gated=index == 0)
            torch.cuda.synchronize()
            assert torch.equal(one, again), (number, index)
            before = one


def test_ordinary_steps_of_some_rows() -> None:
    x, weight, bias = inputs(17, 4096, 1024, torch.bfloat16)
    library = torch.nn.functional.linear
    for ops in (CudaOps(), CudaOps("all")):
        for rows in (2, 3, 8):
            some = x[:rows]
            found = linear_rows.product(some, weight, bias, RowsTile(4, 6))
            gated = linear_rows.product(some, weight, tile=RowsTile(4, 4), gated=True)
            assert torch.equal(ops.linear(some, weight, bias), found)
            assert torch.equal(ops.linear_silu_mul(some, weight), gated)
        assert torch.equal(ops.linear(x, weight, bias), library(x, weight, bias)), "17 rows"
    some = x[:5]
    assert torch.equal(CudaOps("deterministic").linear(some, weight, bias), library(some, weight, bias))
    invariant = CudaOps()
    invariant.invariant = True
    assert torch.equal(invariant.linear(some, weight, bias), linear_invariant(some, weight, bias))


def test_what_our_kernels_cannot_read_goes_to_the_library() -> None:
    large, library = torch.randn(4096, 4096, dtype=torch.bfloat16, device="cuda"), torch.nn.functional.linear
    for x, weight in (
        inputs(5, 64, 72, torch.bfloat16)[:2],
        inputs(5, 64, 64, torch.float32)[:2],
        (large[:5, 1:65], large[:64, :64]),
        (large[:5, :64], large[:64, :64].t()),
    ):
        assert torch.equal(CudaOps().linear(x, weight), library(x, weight))
