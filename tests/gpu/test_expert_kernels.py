"""Expert kernels against their references: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from frame.core.ops import layers as reference
from frame.interfaces import Gating, RouterSpec
from frame.kernels import experts as kernels, routing
from frame.kernels.expert_launch import Launch, Tile, invariant_launch, rule, vector_launch
from frame.plugins.platforms.cuda.compile.rehearsal import rehearse
from frame.plugins.platforms.cuda.ops import CudaOps
from frame.testing.op_cases import GATINGS, ROUTERS

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
LAUNCHES = {
    "vector": Launch(0, Tile(16, 32, 2), Tile(16, 16, 2)),
    "grouped": Launch(16, Tile(16, 32, 4, 2), Tile(32, 16, 4, 2)),
    "swapped": Launch(16, Tile(32, 16, 4, 2, True), Tile(64, 32, 4, 2, True)),
    "copied": Launch(16, Tile(16, 32, 4, 2, False, True), Tile(32, 16, 4, 2, True, True)),
    "rule": None,
}


hopper = pytest.mark.skipif(
    INTERPRETED or not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0),
    reason="Gluon kernels are not interpreted, and this one is for Hopper",
)


def case(tokens: int, experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of fused_experts whose products are of size one."""
    weights, ids = reference.route(torch.randn(tokens, experts), RouterSpec(experts, top_k))
    return {
        "hidden": torch.randn(tokens, hidden).to(dtype).to(DEVICE),
        "gate_up": (torch.randn(experts, 2 * inner, hidden) / hidden**0.5).to(dtype).to(DEVICE),
        "down": (torch.randn(experts, hidden, inner) / inner**0.5).to(dtype).to(DEVICE),
        "weights": weights.to(DEVICE),
        "ids": ids.to(DEVICE),
    }


def widened(value: Any) -> Any:
    """Floats in float64."""
    if isinstance(value, tuple):
        return tuple(widened(one) for one in value)
    return value.double() if isinstance(value, Tensor) and value.is_floating_point() else value


def check(inputs: dict[str, Any], launch: Launch | None = None) -> None:
    dtype = inputs["hidden"].dtype
    found = kernels.fused_experts(**inputs, launch=launch)
    wide = {name: widened(value) for name, value in inputs.items()}
    expected = reference.fused_experts(**wide)
    assert found.dtype == dtype
    assert found.isfinite().all()
    assert (found.double() - expected).norm() <= CLOSE[dtype] * expected.norm()


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_the_parts_of_a_result_are_told_when_they_are_launched(launch: Launch | None) -> None:
    inputs = case(11, 6, 2, 40, 24, torch.float32)
    parts, told = [slice(0, 4), slice(4, 5), slice(5, 11)], []
    found = kernels.fused_experts(
        **inputs,
        launch=launch,
        parts=reference.RowParts(parts, lambda out, part: told.append((part, out[part].clone()))),
    )
    whole = kernels.fused_experts(**inputs, launch=launch)
    assert torch.equal(found, whole)
    assert [part for part, _ in told] == parts
    assert torch.equal(torch.cat([rows for _, rows in told]), whole)


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_experts_of_one_of_several_ranks(launch: Launch | None) -> None:
    """Experts 3 to 6 of 9, by the numbers that all ranks give them."""
    inputs = case(11, 9, 3, 40, 24, torch.float32)
    held = {name: inputs[name][3:7].contiguous() for name in ("gate_up", "down")}
    found = kernels.fused_experts(**{**inputs, **held}, launch=launch, of_all=9, first=3)
    own = kernels.fused_experts(**{**inputs, **held, "ids": inputs["ids"] - 3}, launch=launch, of_all=9)
    assert torch.equal(found, own)
    expected = reference.fused_experts(**{**inputs, **held}, first=3)
    assert (found - expected).norm() <= CLOSE[torch.float32] * expected.norm()


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
@pytest.mark.parametrize(
    ("sizes", "dtype"),
    [
        *(((11, 4, 2, 40, 24), dtype) for dtype in DTYPES),
        ((1, 8, 3, 64, 32), torch.float32),
        *(pytest.param((1, 8, 3, 64, 32), dtype, marks=pytest.mark.slow) for dtype in DTYPES[1:]),
    ],
    ids=str,
)
def test_experts_equal_the_reference(sizes: tuple[int, ...], dtype: torch.dtype, launch: Launch | None) -> None:
    check(case(*sizes, dtype=dtype), launch)


def biased(inputs: dict[str, Tensor], gating: Gating) -> dict[str, Any]:
    """The inputs with another gating, and biases."""
    number, hidden, inner = inputs["down"].shape
    rows = inner * (2 if gating.gated else 1)
    biases = tuple(torch.randn(number, size).to(inputs["down"]) for size in (rows, hidden))
    return {**inputs, "gate_up": inputs["gate_up"][:, :rows].contiguous(), "gating": gating, "biases": biases}


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
@pytest.mark.parametrize("gating", GATINGS, ids=str)
def test_every_gating_with_biases(gating: Gating, launch: Launch | None) -> None:
    check(biased(case(11, 4, 2, 40, 24, torch.float32), gating), launch)


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
@pytest.mark.parametrize("place", [0, 1])
def test_one_bias_alone(place: int, launch: Launch | None) -> None:
    """Of ranks that divide each expert only the first one adds the second."""
    inputs = biased(case(1, 4, 2, 40, 24, torch.float32), GATINGS[3])
    biases = [None, None]
    biases[place] = inputs["biases"][place]
    check({**inputs, "biases": tuple(biases)}, launch)


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES.keys())
def test_ids_of_other_ranks_add_nothing(launch: Launch | None) -> None:
    inputs = case(5, 12, 4, 32, 16, torch.float32)
    first = {**inputs, "gate_up": inputs["gate_up"][4:8], "down": inputs["down"][4:8], "ids": inputs["ids"] - 4}
    first["ids"][3] = torch.tensor([-1, 4, 2**31 - 1, -(2**31)], device=DEVICE)
    check(first, launch)
    assert not kernels.fused_experts(**first, launch=launch)[3].any()


@pytest.mark.parametrize("expert", [0, 4])
def test_all_tokens_on_one_expert(expert: int) -> None:
    inputs = case(40, 5, 1, 32, 16, torch.float32)
    inputs["ids"].fill_(expert)
    check(inputs, LAUNCHES["grouped"])


def test_tokens_with_a_stride() -> None:
    inputs = case(6, 4, 2, 32, 16, torch.float32)
    inputs["hidden"] = torch.randn(6, 96).to(DEVICE)[:, 32:64]
    for launch in LAUNCHES.values():
        check(inputs, launch)


def test_no_tokens() -> None:
    inputs = case(0, 4, 2, 32, 16, torch.float32)
    assert kernels.fused_experts(**inputs).shape == (0, 32)
    weights, ids = routing.route(torch.empty(0, 4, device=DEVICE), RouterSpec(4, 2))
    assert weights.shape == ids.shape == (0, 2)


@pytest.mark.parametrize("block_m", [16, 64])
@pytest.mark.parametrize("tokens", [1, 50, 700, 2340, 2341, pytest.param(9000, marks=pytest.mark.slow)])
def test_blocks_hold_every_pair_once_and_in_order(tokens: int, block_m: int) -> None:
    ids = torch.randint(-2, 9, (tokens, 7), dtype=torch.int32)
    blocks = routing.align(ids.to(DEVICE), range(7), block_m)
    used = int(blocks.used[0])
    assert used <= blocks.slots.shape[0]
    found: dict[int, list[int]] = {}
    for expert, slots in zip(blocks.experts[:used].tolist(), blocks.slots[:used].tolist(), strict=True):
        found.setdefault(expert, []).extend(slots)
    flat = ids.flatten()
    for expert in range(7):
        own = torch.where(flat == expert)[0].tolist()
        padding = -len(own) % block_m
        assert found.pop(expert, []) == own + [flat.numel()] * padding
    assert not found


@pytest.mark.parametrize("size", [24, pytest.param(1030, marks=pytest.mark.slow)])
def test_rows_are_spread_to_where_their_pairs_are_and_combined_from_there(size: int) -> None:
    ids = torch.randint(-1, 6, (50, 3), dtype=torch.int32)
    x, weights = torch.randn(50, 2 * size)[:, :size].to(DEVICE), torch.rand(50, 3).to(DEVICE)
    blocks = routing.align(ids.to(DEVICE), range(5), 16)
    spread = routing.spread(x, ids.to(DEVICE), range(5), blocks)
    slots = blocks.slots[: int(blocks.used[0])].flatten()
    held = slots < ids.numel()
    assert torch.equal(slots[blocks.places[slots[held]]], slots[held])
    assert torch.equal(spread[: len(slots)][held], x[slots[held] // 3])
    pairs = torch.zeros(ids.numel(), size, device=DEVICE)
    pairs[slots[held]] = spread[: len(slots)][held]
    spread[: len(slots)][~held] = float("nan")
    found = kernels.combine(spread, weights, ids.to(DEVICE), range(5), blocks.places)
    assert torch.equal(found, kernels.combine(pairs, weights, ids.to(DEVICE), range(5)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("experts", "top_k"), [(4, 1), (128, 8), (100, 5)])
@pytest.mark.parametrize("renormalize", [True, False])
def test_route(experts: int, top_k: int, renormalize: bool, dtype: torch.dtype) -> None:
    logits = (torch.stack([torch.randperm(experts) for _ in range(3)]) / 16).to(dtype).to(DEVICE)
    spec = RouterSpec(experts, top_k, renormalize=renormalize)
    found, expected = routing.route(logits, spec), reference.route(logits, spec)
    assert torch.equal(found[1], expected[1])
    torch.testing.assert_close(found[0], expected[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("spec", ROUTERS, ids=lambda spec: f"{spec.score} {spec.top_k} of {spec.num_experts}")
def test_routers_of_families(spec: RouterSpec) -> None:
    logits = torch.stack([torch.randperm(spec.num_experts) for _ in range(4)]).float() / 8
    bias = torch.randn(spec.num_experts) if spec.corrected else None
    expected = reference.route(logits, spec, bias)
    found = routing.route(logits.to(DEVICE), spec, None if bias is None else bias.to(DEVICE))
    assert torch.equal(found[1].cpu(), expected[1])
    torch.testing.assert_close(found[0].cpu(), expected[0], atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("sizes", [(1, 2, 8, 8), (7, 2, 8, 12), (300, 8, 128, 160), (513, 10, 512, 520)], ids=str)
def test_tokens_go_to_the_replicas_of_their_experts(sizes: tuple[int, int, int, int], padded: bool) -> None:
    """Ids of no expert stay out, and padding is not counted."""
    tokens, top_k, experts, num_slots = sizes
    draw = torch.Generator().manual_seed(0)
    ids = torch.randint(-1, experts + 1, (tokens, top_k), generator=draw, dtype=torch.int32)
    slots_of = torch.full((experts, num_slots - experts + 1), -1, dtype=torch.int32)
    counts = torch.zeros(experts, dtype=torch.int32)
    more = torch.randint(0, experts, (num_slots - experts,), generator=draw).tolist()
    for slot, expert in enumerate([*range(experts), *more]):
        slots_of[expert, counts[expert]] = slot
        counts[expert] += 1
    mapping = torch.randint(-1, 3, (tokens,), generator=draw).to(DEVICE) if padded else None
    given = [tensor.to(DEVICE) for tensor in (ids, slots_of, counts)]
    loads = [torch.zeros(num_slots, dtype=torch.int32, device=DEVICE) for _ in range(2)]
    found, wanted = routing.place_experts, reference.place_experts
    assert torch.equal(found(*given, loads[0], mapping), wanted(*given, loads[1], mapping))
    assert torch.equal(*loads)


def test_route_takes_the_lowest_id_of_a_tie() -> None:
    logits = torch.zeros(2, 10)
    logits[1, 7] = logits[1, 3] = 1.0
    logits[1, 0] = -float("inf")
    weights, ids = routing.route(logits.to(DEVICE), RouterSpec(10, 3))
    assert ids.tolist() == [[0, 1, 2], [3, 7, 1]]
    torch.testing.assert_close(weights.sum(dim=1).cpu(), torch.ones(2))


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("score", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_a_logit_that_is_not_a_number_shows_in_the_weights(renormalize: bool, score: str) -> None:
    logits = torch.randn(3, 6)
    logits[0], logits[1, 2] = float("nan"), float("nan")
    weights, ids = routing.route(logits.to(DEVICE), RouterSpec(6, 2, score, renormalize=renormalize))
    assert weights[:2].isnan().all()
    assert weights[2].isfinite().all()
    assert ((ids >= 0) & (ids < 6)).all()


def exact_case(tokens: int, experts: int, top_k: int, hidden: int, inner: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Inputs of fused_experts whose sums are exact in any order: gates are 0 or so large that SiLU is x or 0."""
    inputs = case(tokens, experts, top_k, hidden, inner, dtype)
    signs = {name: torch.randint(-1, 2, inputs[name].shape).to(dtype) for name in ("hidden", "gate_up", "down")}
    signs["hidden"][:, 4:] = 0  # four terms a sum: all that follows fits float16
    signs["gate_up"][:, :inner] *= 128
    weights = 0.5 ** torch.arange(1, top_k + 1).repeat(tokens, 1)
    return inputs | {name: value.to(DEVICE) for name, value in signs.items()} | {"weights": weights.to(DEVICE)}


@pytest.mark.parametrize("dtype", DTYPES)
def test_exact_sums_are_the_same_bits_in_any_batch(dtype: torch.dtype) -> None:
    """What the next test says of the order of sums cannot be said of the interpreter; this finds all but that."""
    inputs = exact_case(21, 4, 2, 32, 32, dtype)
    whole = kernels.fused_experts_invariant(**inputs)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    assert torch.equal(whole, reference.fused_experts(**wide).to(dtype))
    for rows in (slice(5, 6), slice(3, 12)):
        part = {name: inputs[name][rows].contiguous() for name in ("hidden", "weights", "ids")}
        assert torch.equal(kernels.fused_experts_invariant(**inputs | part), whole[rows])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter's products come from a library that promises no fixed order")
@pytest.mark.parametrize("dtype", DTYPES)
def test_invariant_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    inputs = case(21, 4, 2, 32, 32, dtype)
    whole = kernels.fused_experts_invariant(**inputs)
    check(inputs, invariant_launch(kernels.shape_of(inputs["down"], 2)))
    for rows in (slice(5, 6), slice(3, 12)):
        part = {name: inputs[name][rows].contiguous() for name in ("hidden", "weights", "ids")}
        assert torch.equal(kernels.fused_experts_invariant(**inputs | part), whole[rows])


@pytest.mark.skipif(INTERPRETED, reason="the interpreter runs one program after another")
def test_repeated_runs_are_bitwise_equal() -> None:
    inputs = case(9, 4, 2, 32, 16, torch.float16)
    for launch in LAUNCHES.values():
        assert torch.equal(
            kernels.fused_experts(**inputs, launch=launch), kernels.fused_experts(**inputs, launch=launch)
        )


@pytest.mark.skipif(INTERPRETED, reason="large")
@pytest.mark.parametrize("tokens", [1, 3, 8, 16, 64, 200, 512, 1100, 3000])
def test_a_real_shape(tokens: int) -> None:
    inputs = case(tokens, 128, 8, 512, 768, torch.bfloat16)
    shape = kernels.shape_of(inputs["down"], 8)
    for launch in (None, rule(shape, tokens), vector_launch(shape) if tokens <= 64 else None):
        check(inputs, launch)


@pytest.mark.skipif(INTERPRETED, reason="needs CUDA graphs")
def test_a_graph_follows_new_ids() -> None:
    inputs = case(64, 32, 4, 128, 64, torch.bfloat16)
    kernels.fused_experts(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.fused_experts(**inputs)
    for _ in range(3):
        fresh = case(64, 32, 4, 128, 64, torch.bfloat16)
        for name in ("hidden", "weights", "ids"):
            inputs[name].copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, kernels.fused_experts(**inputs))


def ragged(tokens: int, experts: int, top_k: int, kind: str) -> Tensor:
    """Ids [tokens, top_k] of an uneven choice."""
    ids = torch.rand(tokens, experts).topk(top_k).indices
    if kind == "most experts empty":
        ids = ids % max(1, experts // 8) + experts // 2
    elif kind == "one expert":
        ids[:] = experts - 1
    elif kind == "one row left over":
        ids[:] = 1
        ids[-1, 0] = 2
    elif kind == "some of other ranks":
        ids = ids - experts // 3
    elif kind == "all of other ranks":
        ids = ids + experts
    return ids.to(torch.int32).to(DEVICE)


KINDS = (
    "even", "most experts empty", "one expert", "one row left over", "some of other ranks", "all of other ranks"
)  # fmt: skip


#: Tokens, experts, of a token, hidden and inner size; of them only the last fill whole tiles.
SIZES = [(64, 1, 1, 64, 64), (129, 4, 2, 192, 320), (700, 16, 3, 72, 40), (1000, 128, 8, 2048, 768)]


@pytest.fixture(scope="module")
def compiled() -> None:
    """Every kernel for Hopper, many at a time: one after another they take a minute."""
    from frame.kernels import experts_hopper

    def launch() -> None:
        for dtype in (torch.bfloat16, torch.float16):
            inputs = case(*SIZES[0], dtype=dtype)
            for tile in experts_hopper.CANDIDATES:
                experts_hopper.fused_experts(**inputs, tile=tile)

    rehearse(launch)


@hopper
@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_many_rows_on_hopper(sizes: tuple[int, int, int, int, int], dtype: torch.dtype, kind: str) -> None:
    from frame.kernels import experts_hopper

    inputs = case(*sizes, dtype=dtype)
    inputs["ids"] = ragged(*sizes[:3], kind)
    tokens = len(inputs["hidden"])
    wide = torch.full((tokens, sizes[3] + 64), float("nan"), dtype=dtype, device=DEVICE)
    wide[:, : sizes[3]] = inputs["hidden"]
    inputs["hidden"] = wide[:, : sizes[3]]
    twin = kernels.fused_experts(**inputs, launch=rule(kernels.shape_of(inputs["down"], sizes[2]), 1 << 20))
    for tile in experts_hopper.CANDIDATES:
        # what is left in memory shows, if it is read
        poison = torch.full((1 << 26,), float("nan"), dtype=dtype, device=DEVICE)
        del poison
        found = experts_hopper.fused_experts(**inputs, tile=tile)
        assert found.isfinite().all()
        assert (found.double() - twin.double()).norm() <= CLOSE[dtype] * twin.double().norm()
    if kind == "all of other ranks":
        assert not found.any()


@hopper
@pytest.mark.parametrize("tile", range(2))
@pytest.mark.parametrize("gating", GATINGS, ids=str)
@pytest.mark.parametrize("sizes", SIZES[1:3], ids=str)
def test_every_gating_with_biases_on_hopper(sizes: tuple[int, int, int, int, int], gating: Gating, tile: int) -> None:
    from frame.kernels import experts_hopper

    inputs = biased(case(*sizes, dtype=torch.bfloat16), gating)
    inputs["ids"] = ragged(*sizes[:3], "some of other ranks")
    expected = reference.fused_experts(**{name: widened(value) for name, value in inputs.items()})
    found = experts_hopper.fused_experts(**inputs, tile=experts_hopper.CANDIDATES[tile])
    assert found.isfinite().all()
    assert (found.double() - expected).norm() <= CLOSE[torch.bfloat16] * expected.norm()


@hopper
@pytest.mark.usefixtures("compiled")
def test_many_rows_on_hopper_are_the_same_bits_in_every_run_and_way() -> None:
    from frame.kernels import experts_hopper

    inputs = case(3000, 128, 8, 2048, 768, torch.bfloat16)
    want = experts_hopper.fused_experts(**inputs)
    wide = {name: value.double() if value.is_floating_point() else value for name, value in inputs.items()}
    expected = reference.fused_experts(**wide)
    assert (want.double() - expected).norm() <= CLOSE[torch.bfloat16] * expected.norm()
    for tile in experts_hopper.CANDIDATES:
        for _ in range(10):
            assert torch.equal(experts_hopper.fused_experts(**inputs, tile=tile), want)


@hopper
def test_ordinary_steps_of_many_rows_go_to_hopper() -> None:
    inputs = case(2048, 32, 4, 256, 128, torch.bfloat16)
    found = kernels.hopper_experts(**inputs)
    assert found is not None
    assert torch.equal(CudaOps().fused_experts(**inputs), found)
    for ops in (CudaOps("deterministic"), CudaOps("all", hopper_experts=False)):
        assert torch.equal(ops.fused_experts(**inputs), kernels.fused_experts(**inputs))
    assert kernels.hopper_experts(**case(64, 32, 4, 256, 128, torch.bfloat16)) is None
    assert kernels.hopper_experts(**case(2048, 32, 4, 256, 72, torch.bfloat16)) is None
    assert kernels.hopper_experts(**case(2048, 32, 4, 256, 128, torch.float32)) is None


@hopper
def test_a_graph_of_many_rows_follows_new_ids() -> None:
    from frame.kernels import experts_hopper

    inputs = case(1000, 16, 4, 256, 128, torch.bfloat16)
    experts_hopper.fused_experts(**inputs)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = experts_hopper.fused_experts(**inputs)
    for kind in KINDS:
        fresh = case(1000, 16, 4, 256, 128, torch.bfloat16) | {"ids": ragged(1000, 16, 4, kind)}
        for name in ("hidden", "weights", "ids"):
            inputs[name].copy_(fresh[name])
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, experts_hopper.fused_experts(**inputs))
