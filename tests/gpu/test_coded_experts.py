"""Experts multiplied by their codes against dequantised weights in float32: on a GPU, and interpreted through
tests/kernels."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from frame.core.ops import Ops, layers as reference
from frame.core.ops.quantized import CodedWeights
from frame.interfaces import Gating, RouterSpec
from frame.kernels import coded_experts as kernels, quantized
from frame.kernels.expert_choice import Choice, Part
from frame.kernels.expert_launch import Launch, Tile, coded_launch
from frame.plugins.quantization.codebook import FP4
from frame.testing.op_cases import GATINGS

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float16] if INTERPRETED else [torch.bfloat16, torch.float16]  # numpy has no bfloat16
CLOSE = {torch.float16: 2e-3, torch.bfloat16: 1e-2}
FP8 = torch.float8_e4m3fn
OSS = Gating(alpha=1.702, shift=1.0, limit=7.0)
LAUNCHES = {
    "alone": Launch(0, Tile(16, 32, 2, 2), Tile(32, 64, 2, 2)),
    "grouped": Launch(16, Tile(16, 64, 4, 2), Tile(32, 32, 4, 2)),
    "swapped": Launch(16, Tile(32, 32, 4, 2, True), Tile(16, 64, 4, 2, True)),
    "tall": Launch(64, Tile(16, 64, 4, 2), Tile(32, 32, 4, 2)),
    "rule": None,
}
#: By name: (rows, columns) of a block, 0 for all columns.
KINDS = {
    "mxfp4": (1, 32), "nvfp4": (1, 16), "int4 by 64": (1, 64), "int4 by 24": (1, 24), "int4 by rows": (1, 0),
    "zeros by 32": (1, 32), "zeros by 128": (1, 128), "zeros by rows": (1, 0),
    "fp8 by rows": (1, 0), "fp8 by blocks": (16, 128), "fp8 by tensors": (0, 0), "int8 by rows": (1, 0),
}  # fmt: skip


def usual_and_slow(*usual: Any, every: Sequence[Any]) -> list[Any]:
    """Cases of which only the usual ones are for every run under the interpreter."""
    slow = [pytest.param(*(one if isinstance(one, tuple) else [one]), marks=pytest.mark.slow) for one in every]
    return [one if one in usual else other for one, other in zip(every, slow, strict=True)]


def coded(kind: str, experts: int, rows: int, depth: int, generator: torch.Generator) -> CodedWeights:
    """Random weights whose products with numbers of size one are of size one."""
    block = KINDS[kind][0] or rows, KINDS[kind][1] or depth
    shape = experts, -(-rows // block[0]), -(-depth // block[1])
    draw, size = partial(torch.randint, generator=generator), depth**-0.5
    scales = (torch.rand(shape, generator=generator) + 0.5) * size
    zeros = numbers = table = None
    if kind.startswith(("fp8", "int8")):
        codes = draw(-127, 128, (experts, rows, depth)).to(torch.int8)
        if kind.startswith("fp8"):
            codes = (torch.randn(experts, rows, depth, generator=generator) * 60).to(FP8)
        scales /= 64
    else:
        codes = draw(-(2**31), 2**31, (experts, rows, depth // 8)).to(torch.int32)
        scales /= 4
    if kind.startswith("zeros"):
        zeros = draw(0, 16, shape).to(torch.uint8)
    if kind == "mxfp4":
        scales = draw(120, 125, shape).to(torch.uint8)
    if kind == "nvfp4":
        scales, numbers = draw(-16, 16, shape).add(32).to(FP8), torch.rand(experts, rows, 1, generator=generator) / 256
    if "fp4" in kind:
        table = torch.tensor(FP4)
    given = [None if one is None else one.to(DEVICE) for one in (codes, scales, zeros, table, numbers)]
    return CodedWeights(given[0], given[1], block, *given[2:], is_float4=table is not None)


def case(
    kind: str, tokens: int, sizes: tuple[int, int, int, int] = (5, 2, 96, 48), gating: Gating = OSS
) -> dict[str, Any]:
    """Inputs of `coded_experts`; `sizes` are experts, chosen ones, hidden and inner size."""
    generator = torch.Generator().manual_seed(tokens)
    experts, top_k, hidden, inner = sizes
    halves = 2 if gating.gated else 1
    group = KINDS[kind][1]
    if group > 1:  # whole groups, of which the weight has some columns, as ranks that share one do
        hidden, stored = -(-hidden // group) * group, -(-inner // group) * group
    else:
        stored = inner
    if kind == "fp8 by blocks":
        inner = stored
    down = coded(kind, experts, hidden, stored, generator)
    if stored != inner:
        down = replace(down, columns=slice((stored - inner) // 2, (stored + inner) // 2))
    weights, ids = reference.route(torch.randn(tokens, experts, generator=generator), RouterSpec(experts, top_k))
    biases = torch.randn(experts, halves * inner), torch.randn(experts, hidden)
    return {
        "hidden": torch.randn(tokens, hidden, generator=generator).to(DTYPES[0]).to(DEVICE),
        "gate_up": coded(kind, experts, halves * inner, hidden, generator),
        "down": down, "weights": weights.to(DEVICE), "ids": ids.to(DEVICE), "gating": gating,
        "biases": tuple(bias.to(DTYPES[0]).to(DEVICE) for bias in biases),
    }  # fmt: skip


def dequantised(inputs: dict[str, Any], **other: Any) -> Tensor:
    """The experts' results by weights in float32, whichever are chosen."""
    wide = {**inputs, **other, "hidden": inputs["hidden"].float()}
    wide["biases"] = tuple(None if bias is None else bias.float() for bias in inputs["biases"])
    pair = [wide.pop(name).weight(Ops(), torch.float32) for name in ("gate_up", "down")]
    return reference.fused_experts(wide.pop("hidden"), *pair, wide.pop("weights"), wide.pop("ids"), **wide)


def check(inputs: dict[str, Any], launch: Launch | None = None, tolerance: float = 0.0, **how: Any) -> Tensor:
    found, dtype = kernels.fused_experts(**inputs, launch=launch, **how), inputs["hidden"].dtype
    expected = dequantised(inputs, **{name: how[name] for name in ("first",) if name in how})
    assert found.dtype == dtype
    assert found.isfinite().all()
    assert (found.float() - expected).norm() <= (tolerance or CLOSE[dtype]) * expected.norm()
    return found


@pytest.mark.parametrize(
    ("kind", "launch"),
    usual_and_slow(
        ("mxfp4", "grouped"), ("zeros by 32", "swapped"), ("int4 by rows", "alone"), ("fp8 by blocks", "grouped"),
        every=[(kind, launch) for kind in KINDS for launch in LAUNCHES],
    ),
)  # fmt: skip
def test_every_kind_of_codes(kind: str, launch: str) -> None:
    """Sizes that are no multiple of a tile, and ranks that hold a part of a group."""
    check(case(kind, 1 if launch == "alone" else 7), LAUNCHES[launch])


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 40, 90])
@pytest.mark.parametrize("kind", ["mxfp4", "nvfp4", "zeros by 32", "fp8 by rows"])
def test_tiles_by_rule(kind: str, tokens: int, dtype: torch.dtype) -> None:
    inputs = case(kind, tokens, (3, 1, 64, 40), GATINGS[0])
    inputs["hidden"] = inputs["hidden"].to(dtype)
    check(inputs)


@pytest.mark.parametrize(
    ("place", "launch"),
    usual_and_slow(
        (4, "grouped"), (5, "swapped"), every=[(i, name) for i in range(len(GATINGS)) for name in list(LAUNCHES)[:3]]
    ),
)
def test_every_gating(place: int, launch: str) -> None:
    check(case("mxfp4", 2, gating=GATINGS[place]), LAUNCHES[launch])


@pytest.mark.parametrize("launch", usual_and_slow("grouped", every=list(LAUNCHES)))
def test_experts_of_one_of_several_ranks(launch: str) -> None:
    """Experts 3 to 7 of 12, by the numbers that all ranks give them; one token has none of them, one a wild id."""
    inputs = case("mxfp4", 6)
    ids = torch.randint(0, 12, (6, 2), dtype=torch.int32)
    ids[2], ids[4, 0] = torch.tensor([0, 9]), torch.tensor(-(2**31))
    inputs["ids"], inputs["biases"] = ids.to(DEVICE), (inputs["biases"][0], None)
    found = check(inputs, LAUNCHES[launch], first=3, of_all=12)
    assert not found[2].any()


@pytest.mark.parametrize("launch", ["grouped", pytest.param("tall", marks=pytest.mark.slow)])
def test_experts_without_tokens_and_tokens_with_a_stride(launch: str) -> None:
    inputs = case("int4 by 64", 20)
    inputs["ids"].fill_(4)
    inputs["ids"][:, 1] = 1
    wide = torch.randn(20, 3 * inputs["hidden"].shape[1]).to(inputs["hidden"])
    inputs["hidden"] = wide[:, 64 : 64 + inputs["hidden"].shape[1]]
    check(inputs, LAUNCHES[launch])
    for name in ("weights", "ids", "hidden"):
        inputs[name] = inputs[name][:0]
    assert kernels.fused_experts(**inputs).shape == inputs["hidden"].shape


@pytest.mark.parametrize(
    "kind", usual_and_slow("fp8 by blocks", every=["fp8 by rows", "fp8 by blocks", "fp8 by tensors"])
)
def test_rounded_tokens(kind: str) -> None:
    """The same products of what tokens are rounded to, for which few are not."""
    sizes = 3, 2, 128, 128
    check(case(kind, 40, sizes), rounds=True)
    inputs = case(kind, 130, sizes)
    found = kernels.fused_experts(**inputs, rounds=True)
    expected = dequantised(inputs)
    far = (found.float() - expected).norm() / expected.norm()
    assert 4e-3 < far < 6e-2  # they are rounded, and to numbers of three bits
    group = 128 if "blocks" in kind else inputs["hidden"].shape[1]
    codes, scales = quantized.round_rows(inputs["hidden"], FP8, group)
    exact = {**inputs, "hidden": Ops().dequantize(codes, scales, (1, group))}
    nearer = (found.float() - dequantised(exact)).norm() / expected.norm()
    assert nearer < far


@pytest.mark.parametrize("lead", [64, 128])
def test_tokens_are_not_rounded_for_columns_behind_others(lead: int) -> None:
    """Such columns share scales that x has not, whose rows begin with them."""
    inputs = case("fp8 by blocks", 130, (3, 2, 128, 256))
    down = replace(inputs["down"], columns=slice(lead, lead + 128))
    tile = LAUNCHES["grouped"].down
    x = torch.randn(260, 128) * torch.linspace(0.01, 10, 128)
    x = x.to(inputs["hidden"])
    blocks = kernels.align(inputs["ids"], range(3), LAUNCHES["grouped"].block_m)
    given = x, down, inputs["ids"], range(3), blocks, tile
    assert torch.equal(kernels.coded_product(*given, rounds=True), kernels.coded_product(*given))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["mxfp4", "zeros by 128", "fp8 by blocks"])
def test_deterministic_tokens_heed_no_batch(kind: str) -> None:
    inputs = case(kind, 50)
    whole = check(inputs, invariant=True)
    for rows in (slice(0, 1), slice(7, 9), slice(13, 50)):
        some = {name: inputs[name][rows] for name in ("hidden", "weights", "ids")}
        assert torch.equal(kernels.fused_experts(**{**inputs, **some}, invariant=True), whole[rows])


@pytest.mark.slow
def test_parts_are_told_when_they_are_launched() -> None:
    inputs, told = case("mxfp4", 11), []
    parts = reference.RowParts([slice(0, 4), slice(4, 11)], lambda out, rows: told.append((rows, out[rows].clone())))
    whole = kernels.fused_experts(**inputs, launch=LAUNCHES["grouped"], parts=parts)
    assert [rows for rows, _ in told] == parts.rows
    assert torch.equal(torch.cat([rows for _, rows in told]), whole)


def test_what_the_kernel_does_not_take() -> None:
    generator = torch.Generator().manual_seed(0)
    whole = coded("int4 by 64", 2, 16, 128, generator)
    assert kernels.fits(whole)
    assert not kernels.fits(replace(whole, table=torch.randn(16)))
    assert not kernels.fits(replace(whole, block=(1, 4), scales=torch.rand(2, 16, 32)))
    assert not kernels.fits(replace(whole, codes=whole.codes[:, ::2]))
    assert kernels.fits(coded("fp8 by blocks", 2, 16, 256, generator))
    assert not kernels.fits(replace(coded("fp8 by blocks", 2, 16, 256, generator), block=(1, 16)))


def test_decodes_have_small_tiles_and_prompts_tall_ones() -> None:
    shape = kernels.shape_of(torch.empty(1, 96, dtype=torch.float16), case("mxfp4", 1, (32, 4, 96, 64))["down"], 4)
    assert (shape.num_experts, shape.hidden_size, shape.intermediate_size) == (32, 96, 64)
    assert [coded_launch(shape, tokens).block_m for tokens in (0, 1, 3, 4, 64, 128, 512, 4096)] == [
        32, 0, 0, 16, 16, 32, 64, 128,
    ]  # fmt: skip
    assert coded_launch(shape, 4096, apart=True).block_m == 64
    for tokens in (5, 100, 3000):  # a warm-up meets powers of two alone
        assert coded_launch(shape, tokens) == coded_launch(shape, 1 << (tokens.bit_length() - 1))
    assert [kernels.many_rows(tokens, 4, 32) for tokens in (1, 4095, 4096, 8192)] == [False, False, True, True]


def ops_of_the_platform() -> Ops:
    from frame.plugins.platforms.cuda.ops import CudaOps

    return CudaOps()


@pytest.mark.parametrize("dtype", [DTYPES[0], torch.float32])
@pytest.mark.parametrize("kind", ["mxfp4", "zeros by 32"])
def test_steps_multiply_by_codes_what_the_kernel_takes(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And dequantise for other types, the chosen experts alone where these are fewer."""
    inputs, ops = case(kind, 1, (5, 2, 64, 32)), ops_of_the_platform()
    calls, kernel = [], kernels.fused_experts
    monkeypatch.setattr(kernels, "fused_experts", lambda *args, **how: calls.append(1) or kernel(*args, **how))
    inputs["hidden"], inputs["biases"] = inputs["hidden"].to(dtype), tuple(one.to(dtype) for one in inputs["biases"])
    expected = dequantised(inputs)
    given = [inputs.pop(name) for name in ("hidden", "gate_up", "down", "weights", "ids")]
    found = ops.coded_experts(*given, **inputs)
    assert bool(calls) == (dtype != torch.float32)
    assert found.dtype == dtype
    assert (found.float() - expected).norm() <= CLOSE.get(dtype, 1e-5) * expected.norm()


@pytest.mark.skipif(INTERPRETED, reason="asks a device for its capability")
@pytest.mark.parametrize("tokens", [1, 64, 3000])
@pytest.mark.parametrize("kind", KINDS)
def test_ops_of_the_platform(kind: str, tokens: int) -> None:
    """As steps call them: from codes, dequantised where that is quicker, and deterministic."""
    inputs, ops = case(kind, tokens, (8, 4, 256, 128)), ops_of_the_platform()
    expected = dequantised(inputs)
    given = [inputs.pop(name) for name in ("hidden", "gate_up", "down", "weights", "ids")]
    for invariant in (False, True):
        ops.invariant = invariant
        found = ops.coded_experts(*given, **inputs, rounds=kind.startswith("fp8"))
        assert (found.float() - expected).norm() <= 6e-2 * expected.norm()


def first_product(inputs: dict[str, Any], choice: Choice, first: int = 0) -> tuple[Tensor, Tensor]:
    """(by a choice, in float32) the first products of the pairs whose experts are held."""
    held = range(first, first + len(inputs["gate_up"].codes))
    ids, how, bias = inputs["ids"], inputs["gating"], inputs["biases"][0]
    blocks = kernels.align(ids, held, choice.block_m) if choice.block_m else None
    found = kernels.inner_by(choice.gate_up, inputs["hidden"], inputs["gate_up"], ids, held, blocks, how, bias)
    weight = inputs["gate_up"].weight(Ops(), torch.float32)
    rows = inputs["hidden"].float().repeat_interleave(ids.shape[1], 0)
    kept = ((ids >= first) & (ids < held.stop)).flatten()
    numbers = (ids.flatten() - first)[kept].long()
    products = torch.einsum("pnk,pk->pn", weight[numbers], rows[kept]) + bias[numbers].float()
    return found[kept].float(), reference.gated(products, how)


VECTORS = Choice(0, Part("vectors", Tile(16, 64, 1)), Part("vectors", Tile(32, 128, 1)))


@pytest.mark.parametrize(
    "kind",
    usual_and_slow(
        "mxfp4", "zeros by 32", every=["mxfp4", "nvfp4", "int4 by 64", "int4 by rows", "zeros by 32", "zeros by 128"]
    ),
)  # fmt: skip
def test_pairs_multiplied_one_by_one(kind: str) -> None:
    """By no tile: experts of one of several ranks, and numbers of columns that fill no step."""
    inputs = case(kind, 2, (5, 2, 160, 128))
    ids = inputs["ids"] + 2
    ids[1, 0] = -(2**31)
    inputs["ids"] = ids
    assert kernels.coded_vectors.fits(inputs["hidden"], inputs["gate_up"])
    given = [inputs[name] for name in ("hidden", "gate_up", "down", "weights", "ids")]
    found = kernels.by_choice(*given, VECTORS, 2, None, inputs["gating"], inputs["biases"])
    expected = dequantised(inputs, first=2)
    assert (found.float() - expected).norm() <= CLOSE[found.dtype] * expected.norm()


def test_an_odd_number_of_outputs_of_pairs_one_by_one() -> None:
    inputs = case("mxfp4", 1, (3, 2, 64, 13))
    found, expected = first_product(inputs, VECTORS)
    assert (found - expected).norm() <= CLOSE[DTYPES[0]] * expected.norm()


def test_weights_that_are_not_multiplied_one_by_one() -> None:
    fits, x = kernels.coded_vectors.fits, torch.empty(1, 128, dtype=torch.float16)
    generator = torch.Generator().manual_seed(0)
    whole = coded("int4 by 64", 2, 16, 128, generator)
    assert fits(x, whole)
    assert not fits(x, replace(whole, columns=slice(0, 64)))
    assert not fits(torch.empty(2, 129, dtype=torch.float16)[:, 1:], whole)
    assert not fits(x, coded("fp8 by rows", 2, 16, 128, generator))
    assert not fits(x, coded("int4 by 24", 2, 16, 96, generator))


@pytest.mark.skipif(INTERPRETED, reason="written in Gluon, which is not interpreted")
@pytest.mark.parametrize(
    ("block_m", "block_n", "coming", "warps"),
    [
        (0, 16, 256, 4), (0, 16, 384, 8), (0, 32, 256, 8), (8, 16, 128, 2), (8, 32, 256, 8), (16, 64, 128, 16),
        (16, 64, 256, 8), (32, 16, 128, 1),
    ],
)  # fmt: skip
def test_few_rows_by_the_matrix_unit(block_m: int, block_n: int, coming: int, warps: int) -> None:
    """Experts of one of several ranks, blocks that are not full, and numbers of columns that fill no step."""
    part = Part("few", Tile(block_n, coming, warps))
    for tokens, sizes in ((1, (5, 2, 96, 64)), (9, (5, 2, 2880, 160)), (70, (4, 2, 224, 13))):
        inputs = case("mxfp4", tokens, sizes)
        inputs["ids"] += 1
        inputs["ids"][0, 0] = -(2**31)
        found, expected = first_product(inputs, Choice(block_m, part, part), 1)
        assert (found - expected).norm() <= 1e-2 * expected.norm()
        if sizes[3] % 32:
            continue
        given = [inputs[name] for name in ("hidden", "gate_up", "down", "weights", "ids")]
        whole = kernels.by_choice(*given, Choice(block_m, part, part), 1, None, inputs["gating"], inputs["biases"])
        expected = dequantised(inputs, first=1)
        assert (whole.float() - expected).norm() <= 1e-2 * expected.norm()
