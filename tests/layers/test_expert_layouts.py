"""Experts with every gating, with biases, from every layout of a checkpoint, over ranks: against the rule by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from frame.interfaces import Dispatched, ExpertSpec, Mesh, RouterSpec, Routing
from frame.ops import Ops
from frame.plugins.models.mixture import Scaled
from frame.testing.ranks import run_mesh
from tests.layers.test_experts import Columns, load_some
from tests.layers.test_sharding import load
from tests.layers.test_weights import make_build

pytestmark = pytest.mark.product

SPECS = {
    "llama": ExpertSpec(3, 6, 8, 2),
    "gelu": ExpertSpec(3, 6, 8, 2, "gelu_pytorch_tanh", bias=True),
    "gpt-oss": ExpertSpec(3, 6, 8, 2, bias=True, alpha=1.702, shift=1.0, limit=0.9, transposed=True, interleaved=True),
    "ungated": ExpertSpec(3, 6, 8, 2, "relu2", gated=False, names=("up_proj", "down_proj"), bias=True),
    "on the input": ExpertSpec(3, 6, 8, 2, bias=True, weights_on_input=True),
    "rows in turns": ExpertSpec(
        3, 6, 8, 2, interleaved=True, names=("w1", "w3", "w2"), joined=("in.weight", "out.weight")
    ),
}


def tensors_of(spec: ExpertSpec) -> dict[str, Tensor]:
    """Each expert's tensors."""
    *first, down = spec.names
    sizes = [*((name, (8, 6)) for name in first), (down, (6, 8))]
    found = {f"x.{e}.{name}.weight": torch.randn(size) for e in range(3) for name, size in sizes}
    if spec.bias:
        found |= {f"x.{e}.{name}.bias": torch.randn(size[0]) for e in range(3) for name, size in sizes}
    return found


def by_hand(spec: ExpertSpec, tensors: dict[str, Tensor], hidden: Tensor, routing: Routing) -> Tensor:
    """The rule, for each token and each of its experts."""
    out = torch.zeros_like(hidden)

    def product(expert: int, name: str, x: Tensor) -> Tensor:
        bias = tensors.get(f"x.{expert}.{name}.bias", torch.zeros(()))
        return tensors[f"x.{expert}.{name}.weight"] @ x + bias

    def active(x: Tensor) -> Tensor:
        if spec.activation == "relu2":
            return x.relu() ** 2
        return (
            nn.functional.gelu(x, approximate="tanh") if "gelu" in spec.activation else x * (spec.alpha * x).sigmoid()
        )

    *first, down = spec.names
    for token, experts in enumerate(routing.ids.tolist()):
        for choice, expert in enumerate(experts):
            weight = routing.weights[token, choice]
            x = hidden[token] * weight if spec.weights_on_input else hidden[token]
            inner = [product(expert, name, x) for name in first]
            if spec.limit:
                inner = [inner[0].clamp(max=spec.limit), inner[1].clamp(-spec.limit, spec.limit)]
            value = active(inner[0]) * (inner[1] + spec.shift) if spec.gated else active(inner[0])
            out[token] += product(expert, down, value) * (1.0 if spec.weights_on_input else weight)
    return out


def joined(spec: ExpertSpec, tensors: dict[str, Tensor], *, transposed: bool) -> dict[str, Tensor]:
    """The two tensors of all experts, and their biases, as a checkpoint of the layout has them."""
    *first, down = spec.names
    names = spec.joined or ("gate_up_proj" if spec.gated else "up_proj", "down_proj")
    found = {}
    for kind, suffix in (("weight", ""), ("bias", "_bias")) if spec.bias else (("weight", ""),):
        *parts, outer = [torch.stack([tensors[f"x.{e}.{name}.{kind}"] for e in range(3)]) for name in (*first, down)]
        inner = torch.stack(parts, 2).flatten(1, 2) if spec.interleaved else torch.cat(parts, 1)
        if transposed and kind == "weight":
            inner, outer = inner.transpose(1, 2).contiguous(), outer.transpose(1, 2).contiguous()
        found |= {f"x.{names[0]}{suffix}": inner, f"x.{names[1]}{suffix}": outer}
    return found


@pytest.mark.parametrize(
    "mesh", [Mesh(), Mesh(tensor=2), Mesh(tensor=4, expert_parallel=True)], ids=["alone", "divided", "more ranks"]
)
@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_every_kind_of_experts_from_every_layout(spec, mesh):
    torch.manual_seed(0)
    tensors = tensors_of(spec)
    hidden, routing = torch.randn(5, 6), Routing(*Ops.route(torch.randn(5, 3), RouterSpec(3, 2)))
    want = by_hand(spec, tensors, hidden, routing)

    def work(groups):
        found = []
        files = tensors, *(joined(spec, tensors, transposed=turned) for turned in (False, True))
        for given in files:
            build = make_build()
            build.groups = groups
            layer = build.experts("x", spec)
            assert set(given) <= {slot.name for slot in layer.weight_slots()}
            found.append(load_some(layer, given)(hidden, routing))
        return found

    for found in run_mesh(mesh, work):
        for out in found:
            torch.testing.assert_close(out, want, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["gpt-oss", "ungated"])
def test_experts_with_biases_take_tokens_slot_by_slot_too(name):
    layer = make_build().experts("x", SPECS[name])
    load_some(layer, tensors_of(SPECS[name]))
    values = torch.randn(3, 4, 6)
    out = layer.method.apply(layer, Dispatched(values, counts=torch.tensor([4, 4, 4], dtype=torch.int32)))
    for slot in range(3):
        routing = Routing(torch.ones(4, 1), torch.full((4, 1), slot, dtype=torch.int32))
        torch.testing.assert_close(out[slot], layer(values[slot], routing))


@pytest.mark.parametrize("whole", [False, True], ids=["divided", "whole experts"])
def test_no_sum_begins_of_what_is_added_to_another_or_scaled(whole: bool) -> None:
    """Rows of 24 bytes: with 64 bytes a part, a sum of nine rows would begin in three parts."""
    torch.manual_seed(0)
    tensors, hidden, down = tensors_of(SPECS["llama"]), torch.randn(9, 6), torch.randn(6, 6)
    routing = Routing(*Ops.route(torch.randn(9, 3), RouterSpec(3, 2)))

    def layer(build, *, shares):
        width, rank = 6 // build.groups.tensor.size, build.groups.tensor.rank
        part = load(build.linear("down", 6, 6, shard="row", reduce=False), {"down.weight": down})
        shared = nn.Sequential(Columns(slice(rank * width, (rank + 1) * width)), part) if shares else None
        return load_some(build.experts("x", SPECS["llama"], shared, reduce=False), tensors)

    def work(groups):
        build = make_build()
        build.groups = groups
        groups.tensor.overlap_bytes = 64
        with_shared = groups.tensor.all_reduce(layer(build, shares=True)(hidden, routing))
        scaled = Scaled(Called(layer(build, shares=False)), 0.5)
        return with_shared, groups.tensor.all_reduce(scaled(hidden, routing)[0])

    one = [layer(make_build(), shares=shares)(hidden, routing) for shares in (True, False)]
    for found in run_mesh(Mesh(tensor=2, expert_parallel=whole), work):
        torch.testing.assert_close(found[0], one[0], atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(found[1], 0.5 * one[1], atol=1e-4, rtol=1e-4)


class Called(nn.Module):
    """A part of a layer without a norm."""

    def __init__(self, experts):
        super().__init__()
        self.experts = experts

    def forward(self, hidden, routing):
        return self.experts(hidden, routing), hidden
