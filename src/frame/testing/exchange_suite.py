"""The contract of expert exchanges: what experts give for tokens of several ranks is what they give for all at once.

The ranks are threads of one process. Whatever the routing, the counts of tokens and the number of experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from frame.core.interfaces.collectives import Groups
from frame.core.interfaces.experts import Activations, Dispatched, ExchangeSpec, ExpertExchange, Routing
from frame.core.interfaces.mesh import Mesh
from frame.core.interfaces.model import ForwardStep
from frame.core.ops import Ops

from .plugin_suite import PluginSuite
from .ranks import run_mesh

_MAX_TOKENS, _HIDDEN = 12, 16
#: Runs an exchange's experts: what it handed over, and the first slot of this rank → what `combine` takes.
Compute = Callable[[Dispatched, int], Tensor]


@dataclass(frozen=True)
class Case:
    """Tokens of each data rank, and the experts that each token may choose of `num_experts`; () for any."""

    counts: tuple[int, ...]
    num_experts: int = 6
    top_k: int = 2
    allowed: tuple[int, ...] = ()


#: Equal and different counts, ranks without tokens, no tokens at all, all tokens to one rank, fewer experts than ranks.
CASES = {
    "equal counts": Case((5, 5)),
    "different counts": Case((7, 2)),
    "a rank without tokens": Case((0, 9)),
    "another rank without tokens": Case((4, 0)),
    "no tokens": Case((0, 0)),
    "one rank has all chosen experts": Case((6, 3), allowed=(4, 5)),
    "one expert": Case((3, 4), num_experts=1, top_k=1),
    "every expert": Case((3, 4), num_experts=3, top_k=3),
}


class ExpertExchangeSuite(PluginSuite):
    """The contract of `frame.interfaces.ExpertExchange`.

        class TestMine(ExpertExchangeSuite):
            plugin = "mine"            # or target = "package.module:Class"

    `device` is where its tokens lie; an exchange that needs more than gloo gives a `run` of its own, in whose threads
    that is the rank's device.
    """

    kind = "exchange"
    device = "cpu"

    def run(self, mesh: Mesh, work: Callable[[Groups], Any]) -> list[Any]:
        """Calls `work` on every rank of `mesh`."""
        return run_mesh(mesh, work)

    def spec(self, mesh: Mesh, num_experts: int, top_k: int) -> ExchangeSpec:
        """For experts spread over all ranks of `mesh`."""
        slots = -(-num_experts // mesh.size)
        return ExchangeSpec(_HIDDEN, top_k, slots, mesh.size, mesh.tensor, _MAX_TOKENS, torch.float32, self.device)

    def exchanged(self, mesh: Mesh, case: Case, compute: Callable[[], Compute]) -> list[tuple[Tensor, Tensor, Tensor]]:
        """On each rank what comes back for its tokens, its tokens, and their weights' sums, after two layers."""
        spec, give = self.spec(mesh, case.num_experts, case.top_k), Tokens(case)

        def work(groups: Groups) -> tuple[Tensor, Tensor, Tensor]:
            exchange, first = self.made(spec, groups), groups.expert.rank * spec.slots_per_rank
            step = ForwardStep(plans=(), batches=(), tokens_per_rank=case.counts)
            for _ in range(2):  # which take turns with one exchange
                x, routing = give.rank(groups.data.rank, self.device)
                sent = exchange.dispatch(Activations(x), routing, step)
                out = groups.tensor.all_reduce(exchange.combine(compute()(sent, first), sent))
            exchange.close()
            exchange.close()
            return out.cpu(), x.cpu(), routing.weights.sum(1, keepdim=True).cpu()

        self.needs_support(spec)
        return self.run(mesh, work)

    def needs_support(self, spec: ExchangeSpec) -> None:
        """Skips the test where the exchange does not support such layers."""
        against = self.found().supports(spec)
        if against is not None:
            pytest.skip(against)

    def made(self, spec: ExchangeSpec, groups: Groups) -> ExpertExchange:
        """The exchange of a rank."""
        exchange = self.make(spec=spec, groups=groups)
        assert isinstance(exchange, ExpertExchange), f"{type(exchange).__name__} does not derive from ExpertExchange"
        return exchange

    @pytest.mark.parametrize("mesh", ["two ranks", "four ranks", "two of two"])
    @pytest.mark.parametrize("name", CASES)
    def test_tokens_get_what_all_experts_give(self, name: str, mesh: str) -> None:
        ranks = _MESHES[mesh]
        case = _spread(CASES[name], ranks)
        weights = torch.randn(2, case.num_experts, 2 * _HIDDEN, _HIDDEN, generator=torch.Generator().manual_seed(1))
        experts = Weights(weights[0] / 4, weights[1, :, :_HIDDEN] / 4)
        give = Tokens(case)
        found = self.exchanged(ranks, case, lambda: experts.of(self.spec(ranks, case.num_experts, case.top_k)))
        for rank, (out, _, _) in enumerate(found):
            x, routing = give.rank(rank // ranks.tensor)
            want = Ops.fused_experts(x, experts.gate_up, experts.down, routing.weights, routing.ids)
            assert torch.allclose(out, want, atol=1e-4, rtol=1e-4), f"rank {rank} has {out}, not {want}"

    def test_what_is_sent_comes_back_weighed(self) -> None:
        """combine(dispatch(x)) without experts in between is x times the sum of its weights."""
        mesh = _MESHES["two ranks"]
        case = Case((5, 3), num_experts=4)
        for out, x, weights in self.exchanged(mesh, case, lambda: _identity(self.spec(mesh, 4, case.top_k))):
            torch.testing.assert_close(out, x * weights, atol=1e-5, rtol=1e-5)

    def test_another_number_of_tokens_than_agreed_is_refused(self) -> None:
        case = Case((3, 3))
        spec = self.spec(_MESHES["two ranks"], case.num_experts, case.top_k)

        def work(groups: Groups) -> None:
            exchange = self.made(spec, groups)
            x, routing = Tokens(case).rank(groups.data.rank, self.device)
            step = ForwardStep(plans=(), batches=(), tokens_per_rank=(2, 2))
            with pytest.raises(ValueError, match="3 tokens"):
                exchange.dispatch(Activations(x), routing, step)

        self.needs_support(spec)
        self.run(_MESHES["two ranks"], work)


_MESHES = {
    "two ranks": Mesh(data=2, expert_parallel=True),
    "four ranks": Mesh(data=4, expert_parallel=True),
    "two of two": Mesh(data=2, tensor=2, expert_parallel=True),
}


def _spread(case: Case, mesh: Mesh) -> Case:
    return replace(case, counts=(case.counts * mesh.data)[: mesh.data])


class Tokens:
    """The tokens of each data rank and their experts, the same on all its tensor ranks and every time."""

    def __init__(self, case: Case) -> None:
        self._case = case

    def rank(self, data_rank: int, device: str = "cpu") -> tuple[Tensor, Routing]:
        """[T, hidden] and the routing of a data rank."""
        case, draw = self._case, torch.Generator().manual_seed(data_rank)
        count = case.counts[data_rank]
        allowed = torch.tensor(case.allowed or range(case.num_experts), dtype=torch.int32)
        order = torch.rand(count, len(allowed), generator=draw).argsort(1)[:, : case.top_k]
        weights = torch.rand(count, case.top_k, generator=draw)
        x = torch.randn(count, _HIDDEN, generator=draw)
        return x.to(device), Routing(weights.to(device), allowed[order].to(device))


@dataclass(frozen=True)
class Weights:
    """All experts: `gate_up` [E, 2I, H] and `down` [E, H, I]."""

    gate_up: Tensor
    down: Tensor

    def of(self, spec: ExchangeSpec) -> Compute:
        """Computes the experts of a rank in either layout."""

        def compute(sent: Dispatched, first: int) -> Tensor:
            own = slice(first, first + spec.slots_per_rank)
            gate_up, down = self.gate_up[own].to(sent.values.device), self.down[own].to(sent.values.device)
            if sent.counts is None:
                return Ops.fused_experts(sent.values, gate_up, down, *_chosen(sent))
            out = torch.zeros_like(sent.values)
            for slot, count in enumerate(sent.counts.tolist()[: len(gate_up)]):
                one = sent.values.new_ones(count, 1)
                zero = one.to(torch.int32) - 1
                rows = sent.values[slot, :count]
                out[slot, :count] = Ops.fused_experts(rows, gate_up[slot, None], down[slot, None], one, zero)
            return out

        return compute


def _identity(spec: ExchangeSpec) -> Compute:
    """Experts that give what they are given."""

    def compute(sent: Dispatched, first: int) -> Tensor:
        if sent.counts is not None:
            return sent.values
        weights, slots = _chosen(sent)
        here = (slots >= 0) & (slots < spec.slots_per_rank)
        return sent.values * (weights * here).sum(1, keepdim=True)

    return compute


def _chosen(sent: Dispatched) -> Routing:
    """The weights and slots of tokens that are handed over as such."""
    assert sent.weights is not None, "tokens come with weights"
    assert sent.slots is not None, "tokens come with slots"
    return Routing(sent.weights, sent.slots)
