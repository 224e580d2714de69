"""Routers and layers of experts: their weights, shared experts, weights on the input, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from frame.interfaces import ExpertSpec, RouterSpec, Routing
from frame.layers import Router
from frame.ops import Ops
from frame.testing.ranks import run_ranks
from tests.layers.test_sharding import load
from tests.layers.test_weights import make_build

pytestmark = pytest.mark.product


def expert_tensors(num_experts=4, hidden=6, inner=8):
    sizes = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    return {
        f"x.{expert}.{name}.weight": torch.randn(shape)
        for expert in range(num_experts)
        for name, shape in sizes.items()
    }


def load_some(module, tensors):
    for slot in module.weight_slots():
        if slot.name in tensors and slot.parameter is not None:
            slot.write(tensors[slot.name][slot.index])
    return module


def test_a_router_reads_its_weight_and_its_correction():
    weight, bias = torch.randn(8, 6), torch.randn(8) * 10
    spec = RouterSpec(8, 2, "sigmoid", corrected=True, scale=2.0)
    router = Router(make_build(), "gate", 6, spec)
    load(router.linear, {"gate.weight": weight})
    load(router, {"gate.e_score_correction_bias": bias})
    assert router.correction is not None
    assert router.correction.dtype == torch.float32
    hidden = torch.randn(5, 6)
    found, want = router(hidden), Ops.route(hidden @ weight.T, spec, bias)
    assert torch.equal(found.ids, want[1])
    torch.testing.assert_close(found.weights, want[0])
    assert [slot.name for slot in Router(make_build(), "gate", 6, spec, correction="other").weight_slots()] == ["other"]


def test_shared_experts_join_the_sum():
    torch.manual_seed(0)
    tensors, down = expert_tensors(), torch.randn(6, 6)
    hidden, routing = torch.randn(5, 6), Routing(*Ops.route(torch.randn(5, 4), RouterSpec(4, 2)))

    def work(group):
        build = make_build(group)
        shared = load(build.linear("down", 6, 6, shard="row", reduce=False), {"down.weight": down})
        width = 6 // group.size
        mine = nn.Sequential(Columns(slice(group.rank * width, (group.rank + 1) * width)), shared)
        alone = load_some(build.experts("x", ExpertSpec(4, 6, 8)), tensors)
        both = load_some(build.experts("x", ExpertSpec(4, 6, 8), mine), tensors)
        return both(hidden, routing) - alone(hidden, routing)

    for size in (1, 2):
        for out in run_ranks(size, work):
            torch.testing.assert_close(out, hidden @ down.T, atol=1e-4, rtol=1e-4)


class Columns(nn.Module):
    """The columns that a rank's row-sharded layer takes."""

    def __init__(self, columns):
        super().__init__()
        self.columns = columns

    def forward(self, x):
        return x[:, self.columns]


@pytest.mark.parametrize("top_k", [1, 2])
def test_weights_may_scale_what_experts_are_given(top_k):
    tensors = expert_tensors()
    hidden = torch.randn(5, 6)
    weights, ids = Ops.route(torch.randn(5, 4), RouterSpec(4, top_k, "sigmoid", renormalize=False))
    found = load_some(make_build().experts("x", ExpertSpec(4, 6, 8, weights_on_input=True)), tensors)(
        hidden, Routing(weights, ids)
    )
    want = torch.zeros(5, 6)
    for token in range(5):
        for weight, expert in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up, down = (tensors[f"x.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            x = hidden[token] * weight
            want[token] += down @ (nn.functional.silu(gate @ x) * (up @ x))
    torch.testing.assert_close(found, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"activation": "gelu"}, "x: experts are gated by 'silu', not by 'gelu'"), ({"bias": True}, "biases")],
)
def test_experts_that_cannot_be_computed_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        make_build().experts("x", ExpertSpec(4, 6, 8, **fields))
