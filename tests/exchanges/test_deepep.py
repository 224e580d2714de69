"""The exchanges over DeepEP, against a library that keeps to its interface and moves tokens through the host."""

from __future__ import annotations

import io
import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from frame.interfaces import Activations, ExchangeSpec, Groups, Mesh, Routing, UnconnectedGroup
from frame.plugins.exchanges.deepep import DeepepExchange, DeepepLowLatencyExchange
from frame.testing import ExpertExchangeSuite, make_setup


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, num_ranks: int) -> int:
        return 0


class Buffer:
    """Takes what the library takes, and nothing else."""

    get_dispatch_config = get_combine_config = staticmethod(lambda num_ranks: Config())
    get_low_latency_rdma_size_hint = staticmethod(lambda tokens, hidden, ranks, experts: tokens * hidden * experts)

    def __init__(
        self, group, num_nvl_bytes=0, num_rdma_bytes=0, low_latency_mode=False, num_qps_per_rank=24,
        explicitly_destroy=False, comm=None,
    ):  # fmt: skip
        assert group is None
        assert (num_rdma_bytes if low_latency_mode else num_nvl_bytes) > 0
        assert explicitly_destroy
        self.comm, self.rank, self.size = comm, comm.Get_rank(), comm.Get_size()
        assert comm.allgather(self.rank) == list(range(self.size))
        assert all(type(one) is bytearray for one in comm.allgather(bytearray(b"handle"))), "as its binding asks for"
        root = comm.allgather(bytearray(b"root") if self.rank == 0 else None)
        assert root == [bytearray(b"root"), *[None] * (self.size - 1)]

    def destroy(self):
        assert self.comm is not None, "destroyed twice"
        self.comm = None

    def gathered(self, **arrays: Tensor) -> list[dict[str, Tensor]]:
        data = io.BytesIO()
        np.savez(data, **{name: array.numpy() for name, array in arrays.items()})
        found = [np.load(io.BytesIO(bytes(one))) for one in self.comm.allgather(bytearray(data.getvalue()))]
        return [{name: torch.from_numpy(one[name]) for name in one.files} for one in found]

    def get_dispatch_layout(self, topk_idx, num_experts):
        assert topk_idx.dtype == torch.int64
        ranks = torch.where(topk_idx < 0, -1, topk_idx // (num_experts // self.size))
        goes = (ranks[..., None] == torch.arange(self.size)).any(1)
        return goes.sum(0).int(), None, torch.bincount(topk_idx[topk_idx >= 0], minlength=num_experts).int(), goes, None

    def dispatch(
        self, x, *, num_tokens_per_rank, num_tokens_per_rdma_rank, is_token_in_rank, num_tokens_per_expert, topk_idx,
        topk_weights,
    ):  # fmt: skip
        assert num_tokens_per_rdma_rank is None
        assert topk_weights.dtype == torch.float32
        assert int(num_tokens_per_rank.sum()) == int(is_token_in_rank.sum())
        local = len(num_tokens_per_expert) // self.size
        first = self.rank * local
        found = self.gathered(x=x, ids=topk_idx, weights=topk_weights, goes=is_token_in_rank)
        mine = [one["goes"][:, self.rank] for one in found]
        came, ids, weights = (torch.cat([one[key][here] for one, here in zip(found, mine, strict=True)])
                              for key in ("x", "ids", "weights"))  # fmt: skip
        inside = (ids >= first) & (ids < first + local)
        sources = [(rank, row) for rank, here in enumerate(mine) for row in here.nonzero()[:, 0].tolist()]
        handle = (torch.tensor(sources, dtype=torch.int64).view(-1, 2), len(x))
        return came, torch.where(inside, ids - first, -1), weights, [], handle, None

    def combine(self, x, handle):
        sources, num_tokens = handle
        out = torch.zeros(num_tokens, x.shape[1])
        for one in self.gathered(x=x, sources=sources):
            here = one["sources"][:, 0] == self.rank
            out.index_add_(0, one["sources"][here, 1], one["x"][here])
        return out, None, None

    def low_latency_dispatch(self, x, topk_idx, num_max_dispatch_tokens_per_rank, num_experts, *, use_fp8):
        assert not use_fp8
        assert len(x) <= num_max_dispatch_tokens_per_rank
        assert topk_idx.dtype == torch.int64
        local = num_experts // self.size
        found = self.gathered(x=x, ids=topk_idx)
        capacity = num_max_dispatch_tokens_per_rank * self.size
        came = torch.full((local, capacity, x.shape[1]), torch.nan)  # what lies beyond the counts is anything
        counts, sources = torch.zeros(local, dtype=torch.int32), torch.full((local, capacity, 2), -1)
        for rank, one in enumerate(found):
            for row, ids in enumerate(one["ids"].tolist()):
                for expert in ids:
                    slot = expert - self.rank * local
                    if 0 <= slot < local:
                        place = int(counts[slot])
                        came[slot, place], sources[slot, place] = one["x"][row], torch.tensor([rank, row])
                        counts[slot] += 1
        return came, counts, sources, None, None

    def low_latency_combine(self, x, topk_idx, topk_weights, handle):
        assert topk_weights.dtype == torch.float32
        out, local = torch.zeros(len(topk_idx), x.shape[2]), x.shape[0]
        for rank, one in enumerate(self.gathered(x=x, sources=handle)):
            for slot, sources in enumerate(one["sources"]):
                for place in (sources[:, 0] == self.rank).nonzero()[:, 0].tolist():
                    row = int(sources[place, 1])
                    weight = topk_weights[row][topk_idx[row] == rank * local + slot].sum()
                    out[row] += weight * one["x"][slot, place]
        return out, None, None


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The package `deep_ep`, as if it were installed."""
    module = ModuleType("deep_ep")
    module.__spec__ = ModuleSpec("deep_ep", None)
    module.Buffer = Buffer
    monkeypatch.setitem(sys.modules, "deep_ep", module)


class OnGpus(ExpertExchangeSuite):
    """The suite, with a spec of GPUs; the tokens lie in host memory and stay float32."""

    def spec(self, mesh: Mesh, num_experts: int, top_k: int) -> ExchangeSpec:
        return replace(super().spec(mesh, num_experts, top_k), dtype=torch.bfloat16, device_type="cuda")


@pytest.mark.some(5)
class TestDeepep(OnGpus):
    plugin = "frame-llm:deepep"


@pytest.mark.some(5)
class TestDeepepLowLatency(OnGpus):
    plugin = "frame-llm:deepep-low-latency"


SPEC = ExchangeSpec(16, 2, 3, 4, 1, 128, torch.bfloat16, "cuda")


@pytest.mark.parametrize("kind", [DeepepExchange, DeepepLowLatencyExchange])
def test_every_reason_against_is_said(kind, monkeypatch):
    assert kind.supports(SPEC) is None
    monkeypatch.setattr("frame.plugins.exchanges.host_comm.find_spec", lambda name: None)
    reasons = kind.supports(replace(SPEC, num_ranks=7, max_tokens=600, device_type="cpu", dtype=torch.float16))
    own = "not of 7" if kind is DeepepExchange else "up to 600 tokens a rank, and 511 fit: lower max_num_batched_tokens"
    for words in ("deep_ep is not installed", "needs CUDA devices, not 'cpu'", "bfloat16, not torch.float16", own):
        assert words in reasons


@pytest.mark.parametrize(("kind", "shape"), [(DeepepExchange, (20, 16)), (DeepepLowLatencyExchange, (3, 512, 16))])
def test_a_rehearsal_has_the_shapes_of_the_fullest_step_and_no_library(kind, shape, monkeypatch):
    monkeypatch.delitem(sys.modules, "deep_ep")
    groups = Groups.of(expert=UnconnectedGroup(1, 4), data=UnconnectedGroup(1, 4))
    exchange = kind(make_setup("exchange", spec=SPEC, groups=groups))
    routing = Routing(torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.int32))
    sent = exchange.dispatch(Activations(torch.randn(5, 16)), routing, None)
    assert sent.values.shape == shape
    assert exchange.combine(torch.zeros_like(sent.values), sent).shape == (5, 16)
    exchange.close()
