"""Blocks of pairs with experts of 4-bit floats by the kernel for Hopper, against their weights: there, and
interpreted."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from frame.core.ops import Ops, layers as reference
from frame.interfaces import Gating
from frame.kernels import coded_blocks, coded_experts, expert_choice
from frame.kernels.coded_few import WIDTH
from frame.kernels.expert_choice import Choice, Part
from frame.kernels.expert_launch import Shape, Tile
from frame.kernels.routing import align
from frame.testing.op_cases import GATINGS
from tests.gpu.test_coded_experts import OSS, case, dequantised

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPE = torch.float16 if INTERPRETED else torch.bfloat16
CLOSE = 2e-3 if INTERPRETED else 1e-2
#: Experts, chosen ones, hidden and inner size: inputs that are no whole steps, outputs that are no whole tiles.
SIZES = (5, 3, 416, 352) if not INTERPRETED else (3, 2, 160, 96)
GATE_UP, DOWN = Tile(64, 256, 4, 4), Tile(128, 256, 4, 4)
TILES = [(GATE_UP, DOWN), (Tile(128, 128, 8, 4), Tile(256, 128, 8, 4)), (Tile(128, 384, 8, 3), Tile(256, 256, 8, 8))]
#: More tokens than a block has pairs, and counts that leave a block with few of them.
TOKENS = (9, 20, 64) if INTERPRETED else (9, 20, 64, 130, 250, 511, 1024)


@pytest.fixture(autouse=True)
def hopper() -> None:
    if not INTERPRETED and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs Hopper")


def layer(tokens: int, sizes: tuple[int, int, int, int] = SIZES, gating: Gating = OSS) -> dict[str, Any]:
    """A layer's inputs in the kernel's type."""
    inputs = case("mxfp4", tokens, sizes, gating)
    inputs["hidden"] = inputs["hidden"].to(DTYPE)
    inputs["biases"] = tuple(bias.to(DTYPE) for bias in inputs["biases"])
    return inputs


def both(
    inputs: dict[str, Any], block_m: int, first: int = 0, tiles: tuple[Tile, Tile] = (GATE_UP, DOWN)
) -> tuple[Tensor, Tensor]:
    """(the first products [pairs, I], the second ones of these [pairs, H]) by the kernel."""
    ids, gating, biases = inputs["ids"], inputs["gating"], inputs["biases"]
    held = range(first, first + len(inputs["gate_up"].codes))
    blocks = align(ids, held, block_m)
    tile = tiles[0] if gating.gated else tiles[1]
    inner = coded_blocks.product(
        inputs["hidden"], inputs["gate_up"], ids, held, blocks, tile, shared=ids.shape[1], gating=gating,
        bias=biases[0],
    )  # fmt: skip
    return inner, coded_blocks.product(inner, inputs["down"], ids, held, blocks, tiles[1], bias=biases[1])


def expected(x: Tensor, weight: Any, numbers: Tensor, bias: Tensor | None) -> Tensor:
    """In float32: row i of x times the weight of expert `numbers[i]`, with its bias."""
    every = weight.weight(Ops(), torch.float32)
    found = torch.zeros(len(x), every.shape[1], device=x.device)
    for number in numbers.unique().tolist():
        own = numbers == number
        found[own] = x[own].float() @ every[number].T
        if bias is not None:
            found[own] += bias[number].float()
    return found


def compare(inputs: dict[str, Any], found: tuple[Tensor, Tensor], first: int = 0) -> None:
    """Both products of the pairs whose experts are held."""
    ids, biases = inputs["ids"].flatten(), inputs["biases"]
    kept = (ids >= first) & (ids < first + len(inputs["gate_up"].codes))
    numbers = (ids[kept] - first).long()
    inner, outer = (one[kept] for one in found)
    rows = inputs["hidden"].repeat_interleave(inputs["ids"].shape[1], 0)[kept]
    wanted = reference.gated(expected(rows, inputs["gate_up"], numbers, biases[0]), inputs["gating"])
    close(inner, wanted)
    close(outer, expected(inner, inputs["down"], numbers, biases[1]))


def close(found: Tensor, wanted: Tensor) -> None:
    assert found.isfinite().all()
    assert (found.float() - wanted).norm() <= CLOSE * wanted.norm()


def test_the_order_of_columns() -> None:
    """A column stands where `coded_few` and this kernel meet its code; behind the last one there are zeros."""
    x = torch.arange(1, 161, dtype=torch.int16).view(1, 160).to("cpu" if INTERPRETED else "cuda")
    found = coded_blocks.ordered(x, 2 * WIDTH).cpu().view(2, 4, 2, 2, 4, 2)  # word, place // 2, % 2, thread, half
    for column in range(256):
        chunk, thread, word, half, place = (
            column // 128, column // 32 % 4, column // 8 % 4, column // 4 % 2, column % 4,
        )  # fmt: skip
        assert found[chunk, word, place // 2, place % 2, thread, half] == (column + 1 if column < 160 else 0)


@pytest.mark.parametrize("tiles", TILES if not INTERPRETED else TILES[:2])
@pytest.mark.parametrize("block_m", [16, 32, 64])
def test_both_products(block_m: int, tiles: tuple[Tile, Tile]) -> None:
    for tokens in TOKENS:
        inputs = layer(tokens)
        compare(inputs, both(inputs, block_m, tiles=tiles))


@pytest.mark.parametrize("place", range(len(GATINGS)) if not INTERPRETED else (0, 5))
def test_every_gating(place: int) -> None:
    inputs = layer(40, (4, 2, 96, 64), GATINGS[place])
    compare(inputs, both(inputs, 32))


def test_an_odd_number_of_outputs_and_no_bias() -> None:
    inputs = layer(30, (3, 2, 96, 32))
    blocks, held, weight = align(inputs["ids"], range(3), 16), range(3), inputs["down"]
    odd = type(weight)(weight.codes[:, :77].contiguous(), weight.scales[:, :77].contiguous(), weight.block,
                       table=weight.table, is_float4=True)  # fmt: skip
    x = torch.randn(60, 32).to(inputs["hidden"])
    found = coded_blocks.product(x, odd, inputs["ids"], held, blocks, DOWN)
    close(found, expected(x, odd, inputs["ids"].flatten().long(), None))


@pytest.mark.parametrize("block_m", [16, 64])
def test_experts_of_one_of_several_ranks_and_experts_without_rows(block_m: int) -> None:
    """Experts 2 to 6 of 9, of which one has no rows; wild ids count nothing, and rows of x have a stride."""
    inputs = layer(50)
    experts = len(inputs["gate_up"].codes)
    ids = torch.randint(0, 9, inputs["ids"].shape, generator=torch.Generator().manual_seed(1), dtype=torch.int32)
    ids[ids == 3] = 2
    ids[0, 0], ids[1, 1] = -(2**31), 2**31 - 1
    inputs["ids"] = ids.to(inputs["ids"].device)
    wide = torch.randn(50, 3 * SIZES[2]).to(inputs["hidden"])
    inputs["hidden"] = wide[:, SIZES[2] : 2 * SIZES[2]]
    assert experts == SIZES[0]
    compare(inputs, both(inputs, block_m, 2), 2)


@pytest.mark.skipif(INTERPRETED, reason="chooses a kernel by the device")
def test_whole_layers() -> None:
    """As `by_choice` computes them, with the sum over a token's experts."""
    for tokens, block_m in ((128, 32), (300, 64), (1024, 64)):
        inputs = layer(tokens, (8, 4, 416, 352))
        given = [inputs[name] for name in ("hidden", "gate_up", "down", "weights", "ids")]
        choice = Choice(block_m, Part("warpgroups", TILES[1][0]), Part("warpgroups", TILES[1][1]))
        found = coded_experts.by_choice(*given, choice, gating=OSS, biases=inputs["biases"])
        close(found, dequantised(inputs))


def test_tiles_that_no_program_has() -> None:
    inputs = layer(4)
    blocks = align(inputs["ids"], range(SIZES[0]), 16)
    given = inputs["hidden"], inputs["gate_up"], inputs["ids"], range(SIZES[0])
    with pytest.raises(ValueError, match="16 outputs a warp"):
        coded_blocks.product(*given, blocks, Tile(64, 128, 8, 4), gating=OSS)
    with pytest.raises(ValueError, match="no blocks"):
        coded_blocks.product(*given, None, GATE_UP, gating=OSS)


def test_which_batches_it_serves() -> None:
    """Those whose experts have few rows on average, alike up to a power of two."""
    shape = Shape(32, 4, 2880, 2880, torch.bfloat16)
    found = [expert_choice.choose_blocks(shape, tokens) for tokens in (128, 255, 256, 512, 1023, 1024)]
    assert [one and one.block_m for one in found] == [32, 32, 64, 64, 64, None]
    many = Shape(128, 4, 2880, 2880, torch.bfloat16)
    wide = expert_choice.choose_blocks(many, 128)
    assert wide is not None
    assert wide.block_m == 16


@pytest.mark.skipif(INTERPRETED, reason="chooses a kernel by the device")
def test_steps_take_it_where_it_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, kernel = [], coded_blocks.product
    monkeypatch.setattr(coded_blocks, "product", lambda *given, **how: calls.append(1) or kernel(*given, **how))
    hopper_kernel_cache = coded_experts.hopper_kernel.__globals__["_gluon"]
    hopper_kernel_cache.cache_clear()
    try:
        for tokens, taken in ((127, 0), (128, 2), (200, 2)):
            calls.clear()
            inputs = layer(tokens, (16, 4, 416, 352))
            close(coded_experts.fused_experts(**inputs), dequantised(inputs))
            assert len(calls) == taken
    finally:
        hopper_kernel_cache.cache_clear()
