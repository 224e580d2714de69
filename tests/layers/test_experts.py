"""Routers and layers of experts: their weights, shared experts, weights on the input, what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from frame.interfaces import (
    Dispatched,
    ExchangeSpec,
    ExpertExchange,
    ExpertSpec,
    ForwardStep,
    LocalExchange,
    Mesh,
    RouterSpec,
    Routing,
)
from frame.layers import Router
from frame.ops import Ops
from frame.plugins.exchanges.all_to_all import AllToAllExchange
from frame.plugins.exchanges.gather import GatherExchange
from frame.testing import make_setup
from frame.testing.ranks import run_mesh, run_ranks
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
        if slot.name in tensors and slot.parameter is not None and slot.has_shape(tensors[slot.name].shape):
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
        alone = load_some(build.experts("x", ExpertSpec(4, 6, 8, 2)), tensors)
        both = load_some(build.experts("x", ExpertSpec(4, 6, 8, 2), mine), tensors)
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
    found = load_some(make_build().experts("x", ExpertSpec(4, 6, 8, top_k, weights_on_input=True)), tensors)(
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
    [
        ({"activation": "tanh"}, "no activation 'tanh' of experts; there are: silu, swish, gelu, gelu_new"),
        ({"gated": False}, "experts that are not gated have no tensors"),
        ({"names": ("up", "down")}, "experts that are gated have no tensors"),
    ],
)
def test_experts_that_cannot_be_computed_are_refused(fields, words):
    with pytest.raises(ValueError, match=words):
        make_build().experts("x", ExpertSpec(4, 6, 8, 2, **fields))


@pytest.mark.parametrize("whole", [False, True], ids=["divided", "whole experts"])
def test_sums_of_results_begin_while_others_are_computed(whole: bool) -> None:
    """Rows of 24 bytes: with 64 bytes a part, a sum of nine rows is begun in three parts."""
    torch.manual_seed(0)
    tensors, hidden = expert_tensors(4), torch.randn(9, 6)
    routing = Routing(*Ops.route(torch.randn(9, 4), RouterSpec(4, 2)))
    begun = []

    def work(groups):
        build = make_build()
        build.groups = groups
        groups.tensor.overlap_bytes = 64
        layer = load_some(build.experts("x", ExpertSpec(4, 6, 8, 2), reduce=False), tensors)
        begun.append(len(layer.parts(hidden)))
        return groups.tensor.all_reduce(layer(hidden, routing))

    expected = load_some(make_build().experts("x", ExpertSpec(4, 6, 8, 2)), tensors)(hidden, routing)
    for found in run_mesh(Mesh(tensor=2, expert_parallel=whole), work):
        torch.testing.assert_close(found, expected)
    assert begun == [3, 3]


ROUTERS = {
    "softmax": RouterSpec(3, 2),
    "sigmoid": RouterSpec(3, 2, "sigmoid", renormalize=False),
    "one, scaled": RouterSpec(5, 1, "softmax", renormalize=False, scale=2.5),
    "groups, corrected and scaled": RouterSpec(6, 3, "sigmoid", corrected=True, scale=2.5, num_groups=3, top_groups=2),
    "groups by their best two": RouterSpec(
        6, 2, "sigmoid", corrected=True, num_groups=2, top_groups=1, group_score="top2"
    ),
}


@pytest.mark.parametrize("kind", [GatherExchange, AllToAllExchange])
@pytest.mark.parametrize("mesh", [Mesh(data=2, expert_parallel=True), Mesh(data=2, tensor=2, expert_parallel=True)])
@pytest.mark.parametrize("router", ROUTERS.values(), ids=ROUTERS)
def test_experts_over_data_ranks_give_what_one_rank_gives(
    router: RouterSpec, mesh: Mesh, kind: type[ExpertExchange]
) -> None:
    """With shared experts, which each data rank has for itself, and experts unequally many for the ranks."""
    torch.manual_seed(0)
    number = router.num_experts
    tensors, down, counts = expert_tensors(number), torch.randn(6, 6), (5, 2)
    bias = torch.randn(number) if router.corrected else None
    given = [(torch.randn(count, 6), Routing(*Ops.route(torch.randn(count, number), router, bias))) for count in counts]

    def layer(build):
        group = build.groups.tensor
        width = 6 // group.size
        part = load(build.linear("down", 6, 6, shard="row", reduce=False), {"down.weight": down})
        shared = nn.Sequential(Columns(slice(group.rank * width, (group.rank + 1) * width)), part)
        return load_some(build.experts("x", ExpertSpec(number, 6, 8, router.top_k), shared), tensors)

    def work(groups):
        build = make_build()
        build.groups = groups
        sizes = {"num_ranks": mesh.size, "tensor_size": mesh.tensor, "max_tokens": 8}

        def exchange(spec: ExpertSpec, slots: int) -> ExpertExchange:
            made = ExchangeSpec(spec.hidden_size, spec.top_k, slots, dtype=torch.float32, device_type="cpu", **sizes)
            return kind(make_setup("exchange", spec=made, groups=groups))

        build.exchange = exchange
        build.running.step = ForwardStep(plans=(), batches=(), tokens_per_rank=counts)
        return layer(build)(*given[groups.data.rank])

    alone = layer(make_build())
    for rank, out in enumerate(run_mesh(mesh, work)):
        torch.testing.assert_close(out, alone(*given[rank // mesh.tensor]), atol=1e-4, rtol=1e-4)


def test_a_layout_that_the_experts_do_not_take_ends_the_start():
    class Slots(LocalExchange):
        layout = "pages"

    build = make_build()
    build.exchange = lambda spec, slots: Slots()
    with pytest.raises(ValueError, match="x: Slots hands over pages, and PlainExperts takes tokens, slots"):
        build.experts("x", ExpertSpec(4, 6, 8, 2))


def test_experts_take_tokens_slot_by_slot_too():
    """Rows beyond the counts may hold anything."""
    layer = load_some(make_build().experts("x", ExpertSpec(3, 6, 8, 1)), expert_tensors(3))
    values, counts = torch.randn(3, 4, 6), torch.tensor([4, 0, 2], dtype=torch.int32)
    values[1], values[2, 2:] = torch.nan, torch.nan
    out = layer.method.apply(layer, Dispatched(values, counts=counts))
    for slot, count in enumerate(counts.tolist()):
        one = torch.full((count, 1), slot, dtype=torch.int32)
        want = layer.method.apply(layer, Dispatched(values[slot, :count], None, torch.ones(count, 1), one))
        torch.testing.assert_close(out[slot, :count], want)


def test_weights_on_the_input_need_tokens_with_weights():
    class Slots(LocalExchange):
        layout = "slots"

    build = make_build()
    build.exchange = lambda spec, slots: Slots()
    with pytest.raises(ValueError, match="x: Slots weighs what experts give"):
        build.experts("x", ExpertSpec(4, 6, 8, 1, weights_on_input=True))
