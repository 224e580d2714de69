"""What tests/gpu/test_expert_exchanges.py runs in a process for each rank: the exchange over peer memory.

Memory is shared between processes, so ranks cannot be threads. All processes run these tests in the same order. Ranks
that have GPUs of their own are connected by NCCL, and the exchange is compared with `gather`, too.
"""

from __future__ import annotations

import io
import itertools
import os
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from frame.core.parallel.groups import make_groups
from frame.interfaces import (
    Activations,
    Dispatched,
    ExchangeSpec,
    ExpertExchange,
    ForwardStep,
    Groups,
    Mesh,
    Placement,
    Routing,
)
from frame.plugins.exchanges.gather import GatherExchange
from frame.plugins.exchanges.peer_memory import PeerMemoryExchange
from frame.plugins.platforms.torch_collectives import TorchCollectives, nccl_group
from frame.testing import ExpertExchangeSuite, make_setup

pytestmark = pytest.mark.gpu

RANK, SIZE, FOLDER = (os.environ.get(f"EXCHANGE_{name}", "0") for name in ("RANK", "SIZE", "FOLDER"))
HIDDEN, EXPERTS, TOP_K = 2048, 128, 8
OWN_GPUS = int(SIZE) <= torch.cuda.device_count()
_runs = itertools.count()


@contextmanager
def connected(mesh: Mesh) -> Iterator[Groups]:
    """The groups of this process's rank."""
    if mesh.size != int(SIZE):
        pytest.skip(f"for {mesh.size} ranks")
    device = torch.device("cuda", int(RANK) % torch.cuda.device_count())
    torch.cuda.set_device(device)
    rendezvous = f"file://{FOLDER}/store-{next(_runs)}"
    place = Placement(rank=int(RANK), local_rank=int(RANK), mesh=mesh, rendezvous=rendezvous)
    collectives = TorchCollectives(place, partial(nccl_group, device) if OWN_GPUS else None)
    groups = make_groups(place, collectives)
    yield groups
    groups.expert.host.barrier()  # a rank that is quick must not hang up on the others
    collectives.close()


class TestPeerMemory(ExpertExchangeSuite):
    plugin = "frame-llm:peer-memory"
    device = "cuda"

    def run(self, mesh: Mesh, work: Callable[[Groups], Any]) -> list[Any]:
        """Does this rank's work, and learns what the others found."""
        with connected(mesh) as groups:
            found = io.BytesIO()
            torch.save(work(groups), found)
            return [torch.load(io.BytesIO(one)) for one in groups.expert.host.gather(found.getvalue())]

    def made(self, spec: ExchangeSpec, groups: Groups) -> ExpertExchange:
        one = super().made(spec, groups)
        assert isinstance(one, PeerMemoryExchange)
        assert one._buffers is not None, "the GPUs do not reach each other's memory"
        return one


def factors(slots: Tensor, weights: Tensor, rank: int, slots_per_rank: int) -> tuple[Tensor, Tensor]:
    """By what the experts of a rank multiply each row, and for which rows it has any; sums without rounding."""
    here = (slots >= 0) & (slots < slots_per_rank)
    each = torch.where(here, weights * (1 + slots % 7 + rank), 0.0)
    return each.sum(1, keepdim=True), here.any(1, keepdim=True)


def experts(sent: Dispatched, rank: int, slots_per_rank: int) -> Tensor:
    """Stands for experts: other factors on each rank, nothing of what is in rows without slots."""
    assert sent.slots is not None
    assert sent.weights is not None
    by, here = factors(sent.slots, sent.weights, rank, slots_per_rank)
    return torch.where(here, sent.values.float() * by, 0.0).to(sent.values.dtype)


class Layer:
    """Both exchanges for one rank."""

    def __init__(self, groups: Groups, max_tokens: int) -> None:
        slots, size = EXPERTS // groups.expert.size, groups.expert.size
        spec = ExchangeSpec(HIDDEN, TOP_K, slots, size, 1, max_tokens, torch.bfloat16, "cuda")
        setup = make_setup("exchange", spec=spec, groups=groups)
        self.ours, self.theirs = PeerMemoryExchange(setup), GatherExchange(setup)
        self.rank, self.slots = groups.expert.rank, slots
        assert self.ours._buffers is not None

    def run(self, exchange: ExpertExchange, x: Tensor, routing: Routing, step: ForwardStep | None = None) -> Tensor:
        """What comes back for x."""
        sent = exchange.dispatch(Activations(x), routing, step)
        return exchange.combine(experts(sent, self.rank, self.slots), sent)

    def expected(self, x: Tensor, routing: Routing) -> Tensor:
        """Sums in order of rank of parts that are rounded as they travel."""
        total = torch.zeros_like(x, dtype=torch.float32)
        for rank in range(int(SIZE)):
            by, _ = factors(routing.ids - rank * self.slots, routing.weights, rank, self.slots)
            total += (x.float() * by).to(x.dtype).float()
        return total.to(x.dtype)

    def check(self, found: Tensor, x: Tensor, routing: Routing, step: ForwardStep | None = None) -> None:
        """Two ranks also get the bits of NCCL's sum, more get the sum in another order."""
        assert torch.equal(found, self.expected(x, routing))
        if OWN_GPUS:
            theirs, away = self.run(self.theirs, x, routing, step), 0.0 if int(SIZE) == 2 else 0.03
            torch.testing.assert_close(found, theirs, atol=10 * away, rtol=away)


def tokens(count: int, seed: int, allowed: int = EXPERTS) -> tuple[Tensor, Routing]:
    """Tokens of a rank that choose among the first `allowed` experts."""
    draw = torch.Generator("cuda").manual_seed(1000 * int(RANK) + seed)
    x = torch.randn(count, HIDDEN, generator=draw, device="cuda").to(torch.bfloat16)
    ids = torch.rand(count, allowed, generator=draw, device="cuda").argsort(1)[:, :TOP_K].to(torch.int32)
    weights = torch.randint(1, 64, (count, TOP_K), generator=draw, device="cuda") / 64
    return x, Routing(weights, ids.contiguous())


def test_steps_of_all_counts_with_ranks_that_are_late() -> None:
    """Zero tokens on a rank, all tokens to one, and ranks that begin a call at any time."""
    with connected(Mesh(data=int(SIZE), expert_parallel=True)) as groups:
        layer, same = Layer(groups, 256), random.Random(1)
        for call in range(300):
            counts = tuple(same.choice((0, 1, 3, 17, 40, 128 // int(SIZE))) for _ in range(int(SIZE)))
            x, routing = tokens(counts[int(RANK)], call, allowed=same.choice((EXPERTS, EXPERTS, 16)))
            step = ForwardStep((), (), tokens_per_rank=counts)
            torch.cuda._sleep(random.randrange(1, 200_000))
            layer.check(layer.run(layer.ours, x, routing, step), x, routing, step)
        layer.ours.close()


@pytest.mark.parametrize("count", [1, 16, 128])
def test_graphs_are_replayed_with_new_tokens(count: int) -> None:
    """Three layers in a graph, replayed often, with other steps in between."""
    with connected(Mesh(data=int(SIZE), expert_parallel=True)) as groups:
        layer = Layer(groups, 512)
        x, routing = tokens(count, 0)

        def layers() -> Tensor:
            given = x
            for _ in range(3):
                given = layer.run(layer.ours, given, routing) / 8
            return given

        layers()
        torch.cuda.synchronize()
        groups.expert.host.barrier()
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            found = layers()
            graph.capture_end()
        torch.cuda.synchronize()
        for replay in range(200):
            new, chosen = tokens(count, 1 + replay)
            x.copy_(new)
            routing.ids.copy_(chosen.ids)
            routing.weights.copy_(chosen.weights)
            if replay % 50 == 49:
                first = Routing(chosen.weights[:1], chosen.ids[:1])
                layer.check(layer.run(layer.ours, new[:1], first), new[:1], first)
            torch.cuda._sleep(random.randrange(1, 50_000))
            graph.replay()
            want = x
            for _ in range(3):
                want = layer.expected(want, routing) / 8
            assert torch.equal(found, want), replay
        layer.ours.close()
