"""The kernels of experts' adapters against their reference: on a GPU, and interpreted through tests/kernels."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import Tensor

from frame.core.ops import adapters as reference
from frame.interfaces import Gating
from frame.kernels import expert_adapters as kernels
from frame.plugins.platforms.cuda.ops import CudaOps
from frame.testing.op_cases import GATINGS, Draw, adapted_experts_case

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
#: The interpreter's products take no bfloat16.
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
CLOSE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


def there(value: Any) -> Any:
    """The same on the device."""
    if isinstance(value, Tensor):
        return value.to(DEVICE)
    if isinstance(value, tuple):
        return tuple(there(one) for one in value)
    if isinstance(value, reference.ExpertAdapters):
        return reference.ExpertAdapters(*(one.to(DEVICE) for one in vars(value).values()))
    return value


def wide(value: Any) -> Any:
    """The same in float64, where it is floats."""
    if isinstance(value, Tensor):
        return value.double() if value.is_floating_point() else value
    if isinstance(value, tuple):
        return tuple(wide(one) for one in value)
    if isinstance(value, reference.ExpertAdapters):
        return reference.ExpertAdapters(*(one.double() for one in vars(value).values()))
    return value


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("slots", [(0,) * 6, (2, 0, 1, 2, 0, 4)], ids=["none", "some"])
@pytest.mark.parametrize("first", [0, 3])
@pytest.mark.parametrize("rank", [3, 100])
def test_both_products_get_additions(slots: tuple[int, ...], first: int, rank: int, dtype: torch.dtype) -> None:
    given, how = adapted_experts_case(Draw(dtype), slots, first, rank)
    expected = reference.adapted_experts(*map(wide, given), **how)
    found = kernels.adapted_experts(*map(there, given), **how).cpu().double()
    assert found.isfinite().all()
    assert (found - expected).norm() <= CLOSE[dtype] * expected.norm()


@pytest.mark.parametrize("gating", GATINGS)
def test_gatings_and_biases(gating: Gating) -> None:
    given, how = adapted_experts_case(Draw(torch.float32), (2, 0, 1, 2, 0, 1), gating=gating)
    found = kernels.adapted_experts(*map(there, given), **{name: there(value) for name, value in how.items()}).cpu()
    torch.testing.assert_close(found, reference.adapted_experts(*given, **how), rtol=1e-5, atol=1e-5)


def case(tokens: int, experts: int, hidden: int, inner: int) -> tuple[Any, ...]:
    """Inputs of sizes that take several pieces, blocks of rows and spans, in float32; three slots of rank 40."""
    draw, rank = Draw(torch.float32), 40
    sizes = (2 * rank, hidden), (2 * inner, rank), (rank, inner), (hidden, rank)
    adapters = reference.ExpertAdapters(*(draw.floats(3, experts, *size) / size[1] ** 0.5 for size in sizes))
    gate_up, down = draw.floats(experts, 2 * inner, hidden) / hidden**0.5, draw.floats(experts, hidden, inner)
    weights, ids = torch.rand(tokens, 2), draw.ints(experts, tokens, 2)
    return draw.floats(tokens, hidden), gate_up, down / inner**0.5, weights, ids, adapters, draw.ints(4, tokens)


def test_many_tokens_and_wide_layers() -> None:
    given = case(40, 3, 160, 72)
    found = kernels.adapted_experts(*map(there, given)).cpu()
    torch.testing.assert_close(found, reference.adapted_experts(*given), rtol=1e-4, atol=1e-4)


def test_deterministic_bits_do_not_depend_on_other_tokens() -> None:
    given = case(12, 3, 40, 24)
    ops = CudaOps(device=torch.device(DEVICE))
    ops.invariant = True
    whole = ops.adapted_experts(*map(there, given))
    hidden, gate_up, down, weights, ids, adapters, slots = given
    for rows in (slice(0, 1), slice(7, 11)):
        part = hidden[rows], gate_up, down, weights[rows], ids[rows], adapters, slots[rows]
        found = ops.adapted_experts(*map(there, part))
        assert torch.equal(found, whole[rows]) or (INTERPRETED and torch.allclose(found, whole[rows], atol=1e-5))


@pytest.mark.skipif(INTERPRETED, reason="the interpreter records nothing")
def test_a_recorded_step_serves_other_slots_and_choices() -> None:
    given = list(map(there, case(24, 4, 160, 48)))
    ids, slots = given[4].clone(), given[6].clone()
    given[4], given[6] = torch.zeros_like(ids), torch.zeros_like(slots)
    kernels.adapted_experts(*given)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = kernels.adapted_experts(*given)
    given[4].copy_(ids)
    given[6].copy_(slots)
    graph.replay()
    assert torch.equal(out, kernels.adapted_experts(*given))
