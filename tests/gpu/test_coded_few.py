"""Experts of 4-bit floats for few tokens by the kernel for Hopper, against their weights: there, and interpreted."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from frame.core.ops import Ops, layers as reference
from frame.kernels import coded_few, coded_rows
from frame.kernels.expert_choice import Choice, Part
from frame.kernels.expert_launch import Tile
from frame.kernels.experts import combine
from frame.kernels.routing import align
from tests.gpu.test_coded_experts import OSS, case

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
#: Experts, chosen ones, hidden and inner size: inputs that are no whole steps, outputs that are no whole tiles.
SIZES = (5, 3, 416, 352) if not INTERPRETED else (4, 2, 160, 96)
TILES = [Tile(16, 128, 4, 6), Tile(32, 128, 8), Tile(16, 256, 4)]


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")


def layer(tokens: int) -> dict[str, Any]:
    """A layer's inputs in the kernel's type."""
    inputs = case("mxfp4", tokens, SIZES)
    inputs["hidden"] = inputs["hidden"].to(DTYPE)
    inputs["biases"] = tuple(bias.to(DTYPE) for bias in inputs["biases"])
    return inputs


def pairs_of(x: Tensor, weight: Any, ids: Tensor, bias: Tensor | None) -> Tensor:
    """[pairs, N] in float32: the rows of x, of pairs or of tokens, times what is chosen, with its bias."""
    rows = x.float() if len(x) == ids.numel() else x.float().repeat_interleave(ids.shape[1], 0)
    chosen = weight.weight(Ops(), torch.float32)[ids.flatten().long()]
    found = (chosen @ rows[:, :, None])[:, :, 0]
    return found if bias is None else found + bias[ids.flatten().long()].float()


def close(found: Tensor, expected: Tensor) -> None:
    assert found.isfinite().all()
    assert (found.float() - expected).norm() <= (2e-3 if INTERPRETED else 1e-2) * expected.norm()


@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize("block_m", [0, 8])
def test_both_products(tile: Tile, block_m: int) -> None:
    inputs, held = layer(2), range(SIZES[0])
    blocks = align(inputs["ids"], held, block_m) if block_m else None
    given = inputs["ids"], held, blocks, tile
    x, bias = inputs["hidden"], inputs["biases"]
    inner = coded_few.product(x, inputs["gate_up"], *given, shared=SIZES[1], gating=OSS, bias=bias[0])
    close(inner, reference.gated(pairs_of(x, inputs["gate_up"], inputs["ids"], bias[0]), OSS))
    found = coded_few.product(inner, inputs["down"], *given)
    close(found, pairs_of(inner, inputs["down"], inputs["ids"], None))


@pytest.mark.parametrize("tokens", [1, 2])
@pytest.mark.parametrize(("tile", "early"), [(TILES[0], 0), (TILES[1], 1), (TILES[1], 9), (TILES[2], 2)])
def test_the_second_product_with_its_sum(tile: Tile, early: int, tokens: int) -> None:
    """It has the bits of both launches, experts of other ranks and wild ids count nothing, and counters end at 0."""
    inputs = layer(tokens)
    ids, weights, down = inputs["ids"], inputs["weights"], inputs["down"]
    inner = torch.randn(ids.numel(), SIZES[3]).to(ids.device, DTYPE)
    for first, bias in ((0, inputs["biases"][1]), (2, None)):
        held = range(first, first + SIZES[0])
        ids = (ids + first).clone()
        if first:
            ids[0, 0], ids[0, 1] = 1, -(2**31)
        apart = coded_few.product(inner, down, ids, held, None, tile, bias=bias)
        expected = combine(apart, weights, ids, held)
        for _ in range(2):
            found = coded_few.summed(inner, down, weights, ids, held, tile, early=early, bias=bias)
            assert torch.equal(found, expected)
        assert not coded_rows.counters(inner.device).any()
    close(expected, _summed(inner, inputs, ids, weights))


def _summed(inner: Tensor, inputs: dict[str, Any], ids: Tensor, weights: Tensor) -> Tensor:
    """In float32, of experts 2 to 6."""
    inside = (ids >= 2) & (ids < 2 + SIZES[0])
    pairs = pairs_of(inner, inputs["down"], torch.where(inside, ids - 2, 0), None)
    return (pairs.view(len(ids), SIZES[1], -1) * torch.where(inside, weights, 0.0)[:, :, None]).sum(1)


@pytest.mark.skipif(INTERPRETED, reason="an interpreter runs one kernel after the other")
def test_layers_in_a_chain() -> None:
    """A replayed chain of layers, whose kernels overlap, has the bits of launches that wait for each other."""
    from frame.kernels.coded_experts import by_choice

    inputs = layer(1)
    given = inputs["gate_up"], inputs["down"], inputs["weights"], inputs["ids"]
    choice = Choice(0, Part("few", TILES[0]), Part("summed", TILES[1], 6))

    def one(x: Tensor) -> Tensor:
        found = by_choice(x / x.abs().amax(), *given, choice, gating=OSS, biases=inputs["biases"])
        return found

    _check(inputs["hidden"], one)


def _check(x: Tensor, one: Callable[[Tensor], Tensor]) -> None:
    from tests.gpu.chains import check_chain

    check_chain(x, one)


def test_what_begins_early_has_a_first_product_that_waits() -> None:
    with pytest.raises(ValueError, match="does not wait"):
        Choice(0, Part("tiles", TILES[0]), Part("summed", TILES[1], 2))
    Choice(0, Part("tiles", TILES[0]), Part("summed", TILES[1]))
