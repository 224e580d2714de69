"""The exchange over pplx-kernels, against a library that keeps to its interface and moves tokens through the host."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest
import torch

from frame.interfaces import Activations, ExchangeSpec, Groups, Mesh, Routing, SingleHost, UnconnectedGroup
from frame.plugins.exchanges.host_comm import named_group
from frame.plugins.exchanges.pplx import PplxExchange, _refuse_several_machines
from frame.testing import ExpertExchangeSuite, make_setup, run_ranks

c10d = torch._C._distributed_c10d


class AllToAll:
    """Takes what the library takes, with tensors as its bindings ask for; exchanges as its C++ code does."""

    @classmethod
    def intranode(
        cls, max_num_tokens, num_experts, experts_per_token, rank, world_size, dp_size, hidden_dim, hidden_dim_bytes,
        hidden_dim_scale_bytes, group_name="default",
    ):  # fmt: skip
        assert world_size % dp_size == 0
        assert world_size // dp_size > 1
        assert dp_size == 1, "the stand-in knows no ranks with the same tokens"
        assert hidden_dim_bytes == 2 * hidden_dim
        assert hidden_dim_bytes % 16 == 0
        assert hidden_dim_scale_bytes == 0
        one = cls()
        one.most, one.num_experts, one.top_k, one.rank, one.size, one.hidden = (
            max_num_tokens, num_experts, experts_per_token, rank, world_size, hidden_dim
        )  # fmt: skip
        one.local = num_experts // world_size
        one.group = c10d._resolve_process_group(group_name)
        assert (one.group.rank(), one.group.size()) == (rank, world_size)
        handles = torch.full((world_size, 64), rank, dtype=torch.uint8)
        assert one.to_all(handles)[:, 0].tolist() == list(range(world_size))
        return one

    def to_all(self, rows):
        """Row r of each rank goes to rank r."""
        out = torch.empty_like(rows)
        counts = [1] * self.size
        self.group.alltoall_base(out, rows, counts, counts, c10d.AllToAllOptions()).wait()
        return out

    def gathered(self, tensor):
        """Every rank's tensor of up to `most` rows, the counts of rows first."""
        counts = self.to_all(torch.full((self.size, 1), len(tensor)))[:, 0].tolist()
        padded = tensor.new_zeros(self.most * max(1, *counts), *tensor.shape[1:])
        padded[: len(tensor)] = tensor
        whole = self.to_all(padded[None].expand(self.size, *padded.shape).contiguous())
        return [one[:count] for one, count in zip(whole, counts, strict=True)]

    def destroy(self):
        assert self.group is not None, "destroyed twice"
        self.group = None

    def dispatch(
        self, out_expert_num_tokens, out_expert_x, out_expert_x_scale, dp_x, dp_x_scale, indices, bound_m,
        do_send=True, do_recv=True,
    ):  # fmt: skip
        assert out_expert_x_scale is dp_x_scale is bound_m is None
        assert do_send
        assert do_recv
        assert (out_expert_num_tokens.dtype, out_expert_num_tokens.shape) == (torch.int32, (self.local,))
        assert out_expert_x.shape == (self.local, self.most * self.size, self.hidden)
        assert (indices.dtype, indices.shape) == (torch.uint32, (len(dp_x), self.top_k))
        assert len(dp_x) <= self.most
        assert all(one.is_contiguous() for one in (out_expert_x, dp_x, indices))
        out_expert_x.fill_(torch.nan)
        out_expert_num_tokens.zero_()
        self.sources = [[] for _ in range(self.local)]
        ids = self.gathered(indices.view(torch.int32))
        for rank, (rows, chosen) in enumerate(zip(self.gathered(dp_x), ids, strict=True)):
            for token, experts in enumerate(chosen.tolist()):
                assert len(set(experts)) == self.top_k
                for slot in (expert - self.rank * self.local for expert in experts):
                    if 0 <= slot < self.local:
                        out_expert_x[slot, len(self.sources[slot])] = rows[token]
                        self.sources[slot].append((rank, token))
        out_expert_num_tokens.copy_(torch.tensor([len(one) for one in self.sources], dtype=torch.int32))

    def combine(self, out_tokens, indices, weights, expert_y, bound_m, do_send=True, do_recv=True):
        assert bound_m is None
        assert do_send
        assert do_recv
        assert (weights.dtype, weights.shape) == (torch.float32, indices.shape)
        assert indices.dtype == torch.uint32
        assert out_tokens.shape == (len(indices), self.hidden)
        assert all(one.is_contiguous() for one in (expert_y, weights))
        mine = torch.zeros(self.size, self.most, self.num_experts, self.hidden)
        for slot, sources in enumerate(self.sources):
            for place, (rank, token) in enumerate(sources):
                mine[rank, token, self.rank * self.local + slot] = expert_y[slot, place]
        came = self.to_all(mine).sum(0)[: len(indices)]  # [T, experts, H]
        given = came.gather(1, indices.view(torch.int32).long()[..., None].expand(-1, -1, self.hidden))
        out_tokens.copy_((given * weights[..., None]).sum(1))


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The package `pplx_kernels`, as if it were installed."""
    module = ModuleType("pplx_kernels")
    module.__spec__ = ModuleSpec("pplx_kernels", None)
    module.AllToAll = AllToAll
    monkeypatch.setitem(sys.modules, "pplx_kernels", module)


@pytest.mark.some(5)
class TestPplx(ExpertExchangeSuite):
    """The suite, with a spec of GPUs; the tokens lie in host memory and stay float32."""

    plugin = "frame-llm:pplx"

    def spec(self, mesh: Mesh, num_experts: int, top_k: int) -> ExchangeSpec:
        return replace(super().spec(mesh, num_experts, top_k), dtype=torch.bfloat16, device_type="cuda")


SPEC = ExchangeSpec(16, 2, 3, 4, 1, 128, torch.bfloat16, "cuda")


def test_every_reason_against_is_said(monkeypatch):
    assert PplxExchange.supports(SPEC) is None
    monkeypatch.setattr("frame.plugins.exchanges.host_comm.find_spec", lambda name: None)
    reasons = PplxExchange.supports(
        replace(SPEC, hidden_size=2047, slots_per_rank=64, max_tokens=8192, device_type="cpu", dtype=torch.float32)
    )
    for words in (
        "pplx_kernels is not installed",
        "needs CUDA devices, not 'cpu'",
        "float16, not torch.float32",
        "a token of 8188 bytes is no multiple of 16",
        "given up to 16376 MiB, more than 4096: lower max_num_batched_tokens",
    ):
        assert words in reasons


def test_code_of_torch_finds_the_group_by_its_name():
    """As the library's C++ code does; here an operator of torch calls it from there."""

    def work(group):
        rows = (torch.arange(6, dtype=torch.uint8) + 10 * group.rank).view(2, 3)
        with named_group(group) as name:
            out = torch.ops._c10d_functional.all_to_all_single(rows, [1, 1], [1, 1], name)
            found = torch.ops._c10d_functional.wait_tensor(out)
        with pytest.raises(RuntimeError, match=name):
            c10d._resolve_process_group(name)
        return found.tolist()

    assert run_ranks(2, work) == [[[0, 1, 2], [10, 11, 12]], [[3, 4, 5], [13, 14, 15]]]


def test_ranks_on_several_machines_are_refused():
    class Elsewhere(SingleHost):
        def gather(self, data, timeout_seconds=0.0):
            return [data, b"another machine"]

    _refuse_several_machines(SingleHost())
    with pytest.raises(ValueError, match="one machine, and the ranks are on 2"):
        _refuse_several_machines(Elsewhere())


def test_a_rehearsal_has_the_shapes_of_the_fullest_step_and_no_library(monkeypatch):
    monkeypatch.delitem(sys.modules, "pplx_kernels")
    groups = Groups.of(expert=UnconnectedGroup(1, 4), data=UnconnectedGroup(1, 4))
    exchange = PplxExchange(make_setup("exchange", spec=SPEC, groups=groups))
    routing = Routing(torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.int32))
    sent = exchange.dispatch(Activations(torch.randn(5, 16)), routing, None)
    assert (sent.values.shape, sent.counts.tolist()) == ((3, 512, 16), [0, 0, 0])
    assert exchange.combine(torch.zeros_like(sent.values), sent).shape == (5, 16)
    exchange.close()
