"""The exchange over FlashInfer, against a library that keeps to its interface and moves tokens through the host."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import numpy as np
import pytest
import torch

from frame.interfaces import Activations, ExchangeSpec, Groups, Mesh, Routing, UnconnectedGroup
from frame.plugins.exchanges.flashinfer import FlashinferExchange
from frame.testing import ExpertExchangeSuite, make_setup


class Mapping:
    def __init__(self, *, world_size, rank, tp_size, moe_ep_size):
        assert world_size == tp_size == moe_ep_size
        self.moe_ep_rank, self.moe_ep_size = rank, moe_ep_size


class MnnvlConfig:
    def __init__(self, *, comm_backend):
        self.comm_backend = comm_backend


class MoeAlltoAll:
    """Takes what the library takes, in its order of calls; rows that nobody filled hold anything."""

    def __init__(self, mapping, max_num_tokens, top_k, num_experts, *, hidden_size, mnnvl_config):
        self.comm = mnnvl_config.comm_backend.Split(0, mapping.moe_ep_rank)
        self.rank, self.size = self.comm.Get_rank(), self.comm.Get_size()
        assert (self.rank, self.size) == (mapping.moe_ep_rank, mapping.moe_ep_size)
        assert self.comm.bcast({"from": self.rank}, 1) == {"from": 1}
        self.comm.barrier()
        self.most, self.top_k, self.local, self.hidden = max_num_tokens, top_k, num_experts // self.size, hidden_size
        self.sources = None

    def dispatch(self, token_selected_experts, payloads, room, *, invalid_token_expert_id, expert_id_payload_index):
        assert self.sources is None, "dispatch called twice without combine"
        assert token_selected_experts.dtype == torch.int32
        assert room <= self.most
        assert len(token_selected_experts) <= room
        assert token_selected_experts.shape[1] == self.top_k
        assert all(payload.is_contiguous() for payload in payloads)
        assert payloads[0].shape[1] == self.hidden
        self.num_own = len(token_selected_experts)
        found = self.comm.allgather([payload.numpy().tobytes() for payload in payloads])
        first, came = self.rank * self.local, []
        for number, payload in enumerate(payloads):
            filling = 7 if payload.dtype == torch.int32 else torch.nan
            came.append(torch.full((self.size, room, payload.shape[1]), filling, dtype=payload.dtype))
            for rank, parts in enumerate(found):
                rows = np.frombuffer(bytes(parts[number]), payload.numpy().dtype).reshape(-1, payload.shape[1])
                came[-1][rank, : len(rows)] = torch.from_numpy(rows.copy())
        ids = came[expert_id_payload_index]
        for rank, parts in enumerate(found):
            ids[rank, len(parts[1]) // (4 * self.top_k) :] = invalid_token_expert_id
        ids[(ids < first) | (ids >= first + self.local)] = invalid_token_expert_id
        mine = (ids != invalid_token_expert_id).any(-1)
        came[0][~mine] = torch.nan
        self.sources = mine
        return came

    def combine(self, payload, room):
        assert self.sources is not None, "combine called before dispatch"
        assert payload.shape == (self.size, room, self.hidden)
        rows = torch.where(self.sources[..., None], payload, 0)
        found = self.comm.allgather(rows.numpy().tobytes())
        whole = [torch.frombuffer(one, dtype=rows.dtype).view(rows.shape) for one in found]
        self.sources = None
        return sum(one[self.rank] for one in whole)[: self.num_own]


@pytest.fixture(autouse=True)
def library(monkeypatch):
    """The package `flashinfer`, as if it were installed."""
    parts = {
        "flashinfer": SimpleNamespace(),
        "flashinfer.comm": SimpleNamespace(),
        "flashinfer.comm.mapping": SimpleNamespace(Mapping=Mapping),
        "flashinfer.comm.mnnvl": SimpleNamespace(MnnvlConfig=MnnvlConfig),
        "flashinfer.comm.trtllm_moe_alltoall": SimpleNamespace(MoeAlltoAll=MoeAlltoAll),
    }
    for name, content in parts.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(vars(content))
        monkeypatch.setitem(sys.modules, name, module)


@pytest.mark.some(5)
class TestFlashinfer(ExpertExchangeSuite):
    """The suite, with a spec of GPUs; the tokens lie in host memory and stay float32."""

    plugin = "frame-llm:flashinfer"

    def spec(self, mesh: Mesh, num_experts: int, top_k: int) -> ExchangeSpec:
        return replace(super().spec(mesh, num_experts, top_k), dtype=torch.bfloat16, device_type="cuda")


SPEC = ExchangeSpec(16, 2, 3, 4, 1, 128, torch.bfloat16, "cuda")


def test_every_reason_against_is_said(monkeypatch):
    assert FlashinferExchange.supports(SPEC) is None
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr("frame.plugins.exchanges.host_comm.find_spec", lambda name: None)
    reasons = FlashinferExchange.supports(replace(SPEC, device_type="cpu", dtype=torch.float32))
    for words in (
        "flashinfer is not installed",
        "needs CUDA devices, not 'cpu'",
        "float16, not torch.float32",
    ):
        assert words in reasons


def test_a_rehearsal_has_the_shapes_of_a_step_and_no_library(monkeypatch):
    for name in [name for name in sys.modules if name.split(".")[0] == "flashinfer"]:
        monkeypatch.delitem(sys.modules, name)
    groups = Groups.of(expert=UnconnectedGroup(1, 4), data=UnconnectedGroup(1, 4))
    exchange = FlashinferExchange(make_setup("exchange", spec=SPEC, groups=groups))
    routing = Routing(torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.int32))
    sent = exchange.dispatch(Activations(torch.randn(5, 16)), routing, None)
    assert sent.values.shape == (20, 16)
    assert exchange.combine(torch.zeros_like(sent.values), sent).shape == (5, 16)
    exchange.close()
