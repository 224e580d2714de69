"""When the exchange over peer memory serves; its kernels are tested in tests/gpu/test_expert_exchange_kernels.py."""

from __future__ import annotations

import logging
from dataclasses import replace

import pytest
import torch

from frame.interfaces import Activations, ExchangeSpec, Groups, Mesh, Routing, UnconnectedGroup
from frame.plugins.exchanges.peer_memory import MAX_RANKS, PeerMemoryExchange
from frame.testing import make_setup, run_mesh

peer_memory = pytest.importorskip("frame.kernels.peer_memory")

SPEC = ExchangeSpec(16, 2, 3, 4, 1, 128, torch.bfloat16, "cuda")


def test_every_reason_against_is_said(monkeypatch):
    assert PeerMemoryExchange.supports(SPEC) is None
    assert PeerMemoryExchange.supports(replace(SPEC, num_ranks=16, tensor_size=2)) is None
    assert peer_memory.MAX_RANKS == MAX_RANKS
    monkeypatch.setattr("frame.plugins.exchanges.peer_memory.find_spec", lambda name: None)
    wrong = replace(SPEC, num_ranks=9, hidden_size=15, device_type="cpu", dtype=torch.float8_e4m3fn)
    reasons = PeerMemoryExchange.supports(wrong) or ""
    for words in (
        "triton is not installed",
        "needs CUDA devices, not 'cpu'",
        "float32, not float8_e4m3fn",
        "a token of 15 bytes is no multiple of 8",
        "up to 8 data ranks, not 9",
    ):
        assert words in reasons


def test_devices_that_do_not_reach_each_other_gather(monkeypatch, caplog):
    """All ranks, as the memory is refused on all of them; and the log says why."""

    def refused(*given):
        raise peer_memory.PeerMemoryError("what rank 1 wrote did not reach rank 0")

    monkeypatch.setattr(peer_memory, "PeerMemory", refused)

    def work(groups: Groups) -> torch.Tensor:
        one = PeerMemoryExchange(make_setup("exchange", spec=replace(SPEC, num_ranks=2), groups=groups))
        x = torch.full((3, 16), 1.0 + groups.data.rank)
        routing = Routing(torch.ones(3, 2), torch.tensor([[0, 4]] * 3, dtype=torch.int32))
        sent = one.dispatch(Activations(x), routing, None)
        assert torch.equal(one.combine(sent.values, sent), 2 * x)
        one.close()
        return sent.values

    with caplog.at_level(logging.WARNING, "frame.exchanges"):
        for values in run_mesh(Mesh(data=2, expert_parallel=True), work):
            assert values[:, 0].tolist() == [1, 1, 1, 2, 2, 2]
    assert "expert exchange: gather" in caplog.text
    assert "what rank 1 wrote did not reach rank 0" in caplog.text


def test_a_rehearsal_has_the_shapes_of_a_step_and_no_memory(monkeypatch):
    monkeypatch.setattr(peer_memory, "PeerMemory", None)
    groups = Groups.of(expert=UnconnectedGroup(1, 4), data=UnconnectedGroup(1, 4))
    exchange = PeerMemoryExchange(make_setup("exchange", spec=SPEC, groups=groups))
    routing = Routing(torch.rand(5, 2), torch.zeros(5, 2, dtype=torch.int32))
    sent = exchange.dispatch(Activations(torch.randn(5, 16)), routing, None)
    assert sent.values.shape == (20, 16)
    assert exchange.combine(torch.zeros_like(sent.values), sent).shape == (5, 16)
    exchange.close()
