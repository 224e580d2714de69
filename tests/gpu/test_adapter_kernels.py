"""The kernels of adapters against their references: on a GPU, and under the interpreter through tests/kernels."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

from frame.core.ops import adapters as reference
from frame.kernels import adapters as kernels, few_adapters, joined_adapters
from frame.plugins.adapters import lora
from frame.testing.op_cases import Draw, adapters_case, joined_adapters_case

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
#: The interpreter's products take no bfloat16.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}
PARTS = {"one": ((40, 0),), "three": ((kernels.SPAN, 0), (24, 1), (8, 2)), "joined": ((16, 0), (8, 0), (64, 0), (7, 0))}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [(0,), (3,), (2, 0, 1, 2, 0, 4), (1, 0) * 20], ids=["none", "one", "some", "many"])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("rank", [1, 8, 100])
def test_sums(parts: tuple, slots: tuple[int, ...], rank: int, dtype: torch.dtype) -> None:
    (y, x, weights, groups), _ = adapters_case(Draw(dtype), slots, parts, rank)
    expected = reference.add_adapters(y.clone(), x, weights, groups)
    moved = replace(weights, down=weights.down.to(DEVICE), up=weights.up.to(DEVICE), spans=weights.spans.to(DEVICE))
    there = reference.SlotGroups(*(tensor.to(DEVICE) for tensor in (groups.slots, groups.order, groups.starts)))
    found = kernels.add_adapters(y.to(DEVICE), x.to(DEVICE), moved, there).cpu()
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    untouched = torch.tensor(slots) == 0
    assert torch.equal(found[untouched], y[untouched])


@pytest.mark.parametrize("inputs", [32, 1500])
@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_the_first_products_of_other_ranks_are_gathered(parts: tuple, inputs: int) -> None:
    """As by ranks of which the last has the first rows."""
    draw = Draw(torch.float32)
    (y, _, weights, groups), _ = adapters_case(draw, (2, 0, 1, 2), parts)
    x, down = draw.floats(4, inputs), draw.floats(*weights.down.shape[:2], inputs) / inputs**0.5
    weights = replace(weights, down=down)
    expected = reference.add_adapters(y.clone(), x, weights, groups)
    turned = replace(weights, down=down.flip(1), gather=lambda inner: inner.flip(-1))
    torch.testing.assert_close(reference.add_adapters(y.clone(), x, turned, groups), expected)
    moved = replace(turned, **{name: getattr(turned, name).to(DEVICE) for name in ("down", "up", "spans")})
    there = reference.SlotGroups(*(tensor.to(DEVICE) for tensor in (groups.slots, groups.order, groups.starts)))
    found = kernels.add_adapters(y.to(DEVICE), x.to(DEVICE), moved, there).cpu()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_wide_inputs_are_summed_in_pieces() -> None:
    draw = Draw(torch.float32)
    (y, _, weights, groups), _ = adapters_case(draw, (1, 2, 1), ((40, 0),))
    weights = replace(weights, down=draw.floats(3, 8, 1500) / 40)
    x = draw.floats(3, 1500)
    expected = reference.add_adapters(y.clone(), x, weights, groups)
    moved = replace(weights, down=weights.down.to(DEVICE), up=weights.up.to(DEVICE), spans=weights.spans.to(DEVICE))
    there = reference.SlotGroups(*(tensor.to(DEVICE) for tensor in (groups.slots, groups.order, groups.starts)))
    torch.testing.assert_close(kernels.add_adapters(y.to(DEVICE), x.to(DEVICE), moved, there).cpu(), expected)
    alone = y[:1].to(DEVICE)
    one = reference.SlotGroups.allocate(3, 3, torch.device(DEVICE))
    one.slots[:1] = groups.slots[:1].to(DEVICE)
    reference.group_slots(one, 1)
    batched = kernels.add_adapters(y.to(DEVICE), x.to(DEVICE), moved, there)
    again = kernels.add_adapters(alone, x[:1].to(DEVICE), moved, one)
    assert torch.equal(again, batched[:1]) or (INTERPRETED and torch.allclose(again, batched[:1]))


@pytest.mark.parametrize(("parts", "slots", "rank", "inputs", "piece"), [
    ("three", (2, 0, 1, 2, 0, 4), 16, 1160, 512), ("one", (0,), 16, 512, 512), ("joined", (3,), 16, 17000, 512),
    ("three", (1, 0, 3, 12) * 20, 16, 512, 512), ("joined", (1, 0, 3, 2) * 9, 32, 520, 512),
    ("one", (1, 0, 3, 2) * 9, 64, 1600, 1024), ("joined", (1, 2), 16, 64, 512),
])  # fmt: skip
def test_sums_of_few_slots(parts: str, slots: tuple[int, ...], rank: int, inputs: int, piece: int) -> None:
    draw = Draw(dtype := torch.float16 if INTERPRETED else torch.bfloat16)
    (y, _, weights, groups), _ = adapters_case(draw, slots, PARTS[parts], rank)
    x, count = draw.floats(len(slots), inputs + 8)[:, :inputs], max(weights.down.shape[0], max(slots))
    down = draw.floats(count, weights.down.shape[1], inputs) / inputs**0.5
    up = draw.floats(count, *weights.up.shape[1:])
    up[count // 2] = float("inf") if count // 2 + 1 not in slots else up[count // 2]  # of no token here
    y = draw.floats(len(slots), -(-y.shape[1] // 8) * 8)[:, : y.shape[1]]
    weights = replace(weights, down=down.to(dtype), up=up.to(dtype))
    groups = reference.SlotGroups.allocate(len(slots), count, torch.device("cpu"))
    groups.slots.copy_(torch.tensor(slots))
    reference.group_slots(groups, len(slots))
    expected = reference.add_adapters(y.clone(), x, weights, groups)
    moved = replace(weights, down=weights.down.to(DEVICE), up=weights.up.to(DEVICE), spans=weights.spans.to(DEVICE))
    there = reference.SlotGroups(*(tensor.to(DEVICE) for tensor in (groups.slots, groups.order, groups.starts)))
    target = torch.empty(len(slots), -(-y.shape[1] // 8) * 8, dtype=y.dtype, device=DEVICE)[:, : y.shape[1]]
    target.copy_(y)
    given = x.to(DEVICE) if INTERPRETED else torch.nn.functional.pad(x, (0, 8)).to(DEVICE)[:, :inputs]
    assert few_adapters.fits(target, given, moved)
    found = few_adapters.add_adapters(target, given, moved, there, piece).cpu()
    torch.testing.assert_close(found, expected, rtol=CLOSE[dtype], atol=CLOSE[dtype])
    untouched = torch.tensor(slots) == 0
    assert torch.equal(found[untouched], y[untouched])


def test_tables_choose_the_kernels_of_few_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    draw, asked = Draw(torch.float16), []
    (y, x, weights, groups), _ = adapters_case(draw, (1, 0, 2), ((40, 0),), 16)
    expected = reference.add_adapters(y.clone(), x, weights, groups)
    moved = replace(weights, **{name: getattr(weights, name).to(DEVICE) for name in ("down", "up", "spans")})
    there = reference.SlotGroups(*(tensor.to(DEVICE) for tensor in (groups.slots, groups.order, groups.starts)))

    def found(*given: object) -> object:
        asked.append(given[1:])
        return few_adapters.add_few

    monkeypatch.setattr(kernels, "hopper_kernel", found)
    for table in ({2: 512}, {2: 512, 16: 1024}):
        monkeypatch.setattr(kernels, "FEW", table)
        out = kernels.add_adapters(y.clone().to(DEVICE), x.to(DEVICE), moved, there).cpu()
        torch.testing.assert_close(out, expected, rtol=5e-3, atol=5e-3)
    assert asked == [("few_adapters", "add_few")]


HALVES = ((kernels.SPAN, 0), (24, 0), (kernels.SPAN, 1), (24, 1))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [(0,), (3,), (2, 0, 1, 2, 0, 4), (1, 0, 3) * 27], ids=["none", "one", "some", "many"])
@pytest.mark.parametrize("parts", [*PARTS.values(), HALVES], ids=[*PARTS, "halves"])
@pytest.mark.parametrize(("rank", "sizes"), [
    (1, None), (16, None), (100, None), (16, joined_adapters.Sizes(16, 64, 128, 4, False)),
    (8, joined_adapters.Sizes(16, 32, 16, 4, True)), (64, joined_adapters.Sizes(64, 128, 16, 8, False)),
    (16, joined_adapters.Sizes(64, 64, 128, 4, True)),
])  # fmt: skip
def test_sums_behind_one_product(
    parts: tuple, slots: tuple[int, ...], rank: int, sizes: joined_adapters.Sizes | None, dtype: torch.dtype
) -> None:
    halves = parts == HALVES
    (joined, weights, groups), how = joined_adapters_case(Draw(dtype), slots, parts, rank, halves=halves)
    unused = next(slot for slot in range(max(slots) + 1) if slot + 1 not in slots)
    weights.up[unused] = joined[:, weights.up.shape[1] :].unflatten(1, (-1, weights.down.shape[1]))[:, unused] = float(
        "inf"
    )
    expected = reference.add_joined_adapters(joined, weights, groups, **how)
    moved = replace(weights, **{name: getattr(weights, name).to(DEVICE) for name in ("down", "up", "spans")})
    there = reference.SlotGroups(*(tensor.to(DEVICE) for tensor in (groups.slots, groups.order, groups.starts)))
    found = joined_adapters.add_joined_adapters(joined.to(DEVICE), moved, there, sizes=sizes, **how).cpu()
    off = max(CLOSE[dtype], 1e-4)  # of float32 as many as the rank are added up in another order
    torch.testing.assert_close(found, expected, rtol=off, atol=off)
    untouched = torch.tensor(slots) == 0
    assert halves or torch.equal(found[untouched], joined[untouched, : found.shape[1]])


def test_spans_are_those_of_the_kernel() -> None:
    assert lora.SPAN == kernels.SPAN == few_adapters.SPAN == joined_adapters.SPAN


@pytest.mark.parametrize(("counts", "padding"), [((1,), 0), ((3, 700, 1, 0), 5), ((1, 1, 1), 2)])
def test_slots_of_tokens(counts: tuple[int, ...], padding: int) -> None:
    num_tokens = sum(counts) + padding
    table = torch.tensor([0, 3, 1, 0, 2], dtype=torch.int32, device=DEVICE)
    rows = torch.tensor([4, 1, 0, 2][: len(counts)], dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, *counts], dtype=torch.int32, device=DEVICE).cumsum(0, dtype=torch.int32)
    found, expected = (torch.full((num_tokens + 2,), -7, dtype=torch.int32, device=DEVICE) for _ in range(2))
    kernels.spread_slots(found, table, rows, starts, num_tokens)
    reference.spread_slots(expected, table, rows, starts, num_tokens)
    assert torch.equal(found, expected)
