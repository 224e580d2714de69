"""Tokens moved to their experts and back through shared memory, the ranks on one device: all write, then all read.

tests/gpu/test_expert_exchanges.py has ranks on GPUs of their own, which meet.
"""

from __future__ import annotations

import multiprocessing
import os
import random
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from frame.interfaces import Activations, ExchangeSpec, ForwardStep, Groups, Mesh, Routing
from frame.kernels import expert_exchange as kernels, peer_memory
from frame.testing import ExpertExchangeSuite, make_setup, run_mesh

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]
#: Slots of a rank, the experts of a token, and its size.
SLOTS, TOP_K, HIDDEN = 3, 2, 72


def make_buffers(size: int, dtype: torch.dtype, max_tokens: int, stride: int = 1) -> list[kernels.ExchangeBuffers]:
    """Buffers of `size` ranks, all on this device."""
    words, zeros = HIDDEN * dtype.itemsize // 4, torch.zeros(4, dtype=torch.int64, device=DEVICE)
    one = kernels.ExchangeBuffers(0, size, zeros, zeros, max_tokens, TOP_K, words, SLOTS, stride, stride - 1)
    memory = torch.zeros(size, one.num_bytes // 8, dtype=torch.int64, device=DEVICE)
    addresses = torch.tensor([row.data_ptr() for row in memory], device=DEVICE)
    made = [replace(one, rank=rank, addresses=addresses, state=zeros.clone()) for rank in range(size)]
    made[0].__dict__["memory"] = memory
    return made


def exchange(given, buffers, room):
    """What each rank gets back when the experts of slot s of rank r give x * (1 + s + 10 r), weighed."""
    dispatched = []
    for x, _, _ in given:
        rows = len(buffers) * room
        values = torch.full((rows, HIDDEN), torch.nan, dtype=x.dtype, device=DEVICE)
        kept = torch.full((rows, TOP_K), 7, dtype=torch.int32, device=DEVICE)
        dispatched.append((values, torch.full_like(kept, 7, dtype=torch.float32), kept))
    for phase in ({"receives": False}, {"sends": False}):
        for inputs, outputs, own in zip(given, dispatched, buffers, strict=True):
            kernels.launch_dispatch(inputs, outputs, room, own, **phase)
    results, outs = [], []
    for own, (values, weights, slots) in zip(buffers, dispatched, strict=True):
        factors = torch.where(slots >= 0, weights * (1 + slots + 10 * own.rank), 0.0).sum(1, keepdim=True)
        computed = (values.float() * factors).to(values.dtype)  # NaN where nothing came
        assert torch.equal(computed.isnan().any(1), (slots < 0).all(1)), "rows without slots stay as they were"
        results.append(computed)
        outs.append(torch.empty_like(given[own.rank][0]))
    for phase in ({"receives": False}, {"sends": False}):
        for result, (_, _, slots), (_, ids, _), out, own in zip(results, dispatched, given, outs, buffers, strict=True):
            kernels.launch_combine((result, slots, ids), out, room, own, **phase)
    return outs


def inputs(counts, num_slots, dtype, seed, slot=None):
    """Tokens, ids and weights of each rank; with `slot` all tokens choose that one, and none besides."""
    torch.manual_seed(seed)
    made = []
    for count in counts:
        ids = torch.rand(count, num_slots).argsort(1)[:, :TOP_K].to(torch.int32)
        if slot is not None:
            ids = torch.tensor([slot, -1], dtype=torch.int32).expand(count, TOP_K).contiguous()
        made.append((torch.randn(count, HIDDEN).to(dtype).to(DEVICE), ids.to(DEVICE),
                     torch.rand(count, TOP_K).to(DEVICE)))  # fmt: skip
    return made


def expected(x, ids, weights, size, stride):
    """The sum over ranks in their order, of parts that are rounded as they travel."""
    total = torch.zeros(x.shape, device=DEVICE)
    for rank in range(size):
        slots = ids - (rank * stride + stride - 1) * SLOTS
        held = (slots >= 0) & (slots < SLOTS)
        factors = torch.where(held, weights * (1 + slots + 10 * rank), 0.0).sum(1, keepdim=True)
        total += (x.float() * factors).to(x.dtype).float()
    return total.to(x.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "stride"), [(2, 1), (4, 1), (2, 2)])
def test_many_calls_with_all_counts_of_tokens(dtype: torch.dtype, size: int, stride: int) -> None:
    buffers = make_buffers(size, dtype, max_tokens=6, stride=stride)
    last = stride * size * SLOTS - 1
    cases = [((3,) * size, None), ((6,) * size, None), ((0,) * (size - 1) + (5,), None), ((1, 4) * (size // 2), None),
             ((4,) * size, 0), ((4,) * size, last), ((2,) * size, -1), ((6,) * size, None)]  # fmt: skip
    for call, (counts, slot) in enumerate(cases):
        given = inputs(counts, stride * size * SLOTS, dtype, call, slot)
        for (x, ids, weights), out in zip(given, exchange(given, buffers, max(counts)), strict=True):
            assert torch.equal(out, expected(x, ids, weights, size, stride)), (call, counts, slot)
        assert all(own.state.tolist() == [call + 1, 0, call + 1, 0] for own in buffers)


def test_a_rehearsal_changes_nothing() -> None:
    own = make_buffers(2, torch.float32, max_tokens=4)[0]
    x, ids, weights = inputs((4,), 2 * SLOTS, torch.float32, 0)[0]
    values, kept_weights, slots = kernels.dispatch(x, ids, weights, 4, own, rehearsed=True)
    assert (values.shape, kept_weights.shape, slots.shape) == ((8, HIDDEN), (8, TOP_K), (8, TOP_K))
    assert kernels.combine(values, slots, ids, 4, own, rehearsed=True).shape == x.shape
    assert own.state.tolist() == [0, 0, 0, 0]
    assert not own.__dict__["memory"].any()


def late_rank(rank: int, size: int, path: str, calls: int) -> None:
    """A process that exchanges tokens with others, sending when it likes; an error where bits differ."""
    one, late = make_buffers(size, torch.float32, max_tokens=4)[rank], random.Random(rank)
    memory = torch.from_numpy(np.memmap(path, np.int64, "r+", shape=(size, one.num_bytes // 8)))
    own = replace(one, addresses=torch.tensor([row.data_ptr() for row in memory]))
    for call in range(calls):
        counts = (4, call % 5) if call % 2 else (call % 4, 3)
        slot = (None, None, 0, size * SLOTS - 1)[call % 4]
        x, ids, weights = inputs(counts, size * SLOTS, torch.float32, call, slot)[rank]
        room = max(counts)
        values = torch.full((size * room, HIDDEN), torch.nan)
        kept, slots = torch.empty(size * room, TOP_K), torch.empty(size * room, TOP_K, dtype=torch.int32)
        out = torch.empty_like(x)
        for phase in ({"receives": False}, {"sends": False}):  # the interpreter runs one program after the other
            time.sleep(late.choice((0, 0, 0, 0.2)))  # longer than a call takes
            kernels.launch_dispatch((x, ids, weights), (values, kept, slots), room, own, **phase)
        result = values * torch.where(slots >= 0, kept * (1 + slots + 10 * rank), 0.0).sum(1, keepdim=True)
        for phase in ({"receives": False}, {"sends": False}):
            time.sleep(late.choice((0, 0, 0, 0.2)))  # longer than a call takes
            kernels.launch_combine((result, slots, ids), out, room, own, **phase)
        assert torch.equal(out, expected(x, ids, weights, size, 1)), (rank, call)


@pytest.mark.skipif(not INTERPRETED, reason="tests/gpu/test_expert_exchanges.py has processes with GPUs")
def test_ranks_that_run_at_the_same_time(tmp_path: Path) -> None:
    """Two processes with one memory, each of which is late in some calls, so that the other one has sent before."""
    size, path = 2, tmp_path / "memory"
    path.write_bytes(bytes(size * make_buffers(size, torch.float32, max_tokens=4)[0].num_bytes))
    fork = multiprocessing.get_context("fork")
    ranks = [fork.Process(target=late_rank, args=(rank, size, str(path), 24)) for rank in range(size)]
    for one in ranks:
        one.start()
    until = time.monotonic() + 60
    while any(one.is_alive() for one in ranks) and not any(one.exitcode for one in ranks) and time.monotonic() < until:
        time.sleep(0.05)
    for one in ranks:
        one.join(0.2)
        one.kill()
        one.join()
    assert [one.exitcode for one in ranks] == [0, 0]


class SharedByThreads:
    """Memory of ranks that are threads; as `PeerMemory`."""

    hosts: dict[int, object] = {}  # noqa: RUF012 - by the address of the memory

    def __init__(self, device, rank, size, host, num_bytes):
        self.memory = torch.zeros(num_bytes // 8, dtype=torch.int64, device=DEVICE)
        found = host.gather(self.memory.data_ptr().to_bytes(8, "little"))
        addresses = [int.from_bytes(one, "little") for one in found]
        self.addresses = torch.tensor(addresses, dtype=torch.int64, device=DEVICE)
        self.hosts[addresses[rank]] = host
        self.closed = 0

    def close(self):
        self.closed += 1


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Ranks are threads with one device, which launch one after the other and meet on the host in between."""
    one_at_a_time = threading.Lock()

    def in_turns(launch):
        def both(inputs, outputs, room, buffers, **options):
            for phase in ({"receives": False}, {"sends": False}):
                with one_at_a_time:
                    launch(inputs, outputs, room, buffers, **options, **phase)
                SharedByThreads.hosts[int(buffers.addresses[buffers.rank])].barrier()

        return both

    monkeypatch.setattr(peer_memory, "PeerMemory", SharedByThreads)
    for name in ("launch_dispatch", "launch_combine"):
        monkeypatch.setattr(kernels, name, in_turns(getattr(kernels, name)))
    yield
    SharedByThreads.hosts.clear()


@pytest.mark.usefixtures("threads")
class TestPeerMemory(ExpertExchangeSuite):
    """The suite, with a spec of GPUs."""

    plugin = "frame-llm:peer-memory"
    device = DEVICE

    def spec(self, mesh: Mesh, num_experts: int, top_k: int) -> ExchangeSpec:
        return replace(super().spec(mesh, num_experts, top_k), device_type="cuda")


@pytest.mark.usefixtures("threads")
def test_larger_steps_are_gathered() -> None:
    """Each step is moved in one way on all ranks, whoever has the many tokens, and both ways may take turns."""
    from frame.plugins.exchanges.peer_memory import PeerMemoryExchange, PeerMemoryOptions

    spec = ExchangeSpec(16, 2, 2, 2, 1, 64, torch.float32, "cuda")

    def work(groups: Groups) -> list[int]:
        given = make_setup("exchange", spec=spec, groups=groups)
        one, rows = PeerMemoryExchange(given, PeerMemoryOptions(max_tokens=8)), []
        for counts in ((4, 4), (5, 0), (1, 3), (0, 0)):
            count = counts[groups.data.rank]
            x = torch.full((count, 16), 1.0 + groups.data.rank, device=DEVICE)
            routing = Routing(torch.ones(count, 2, device=DEVICE), torch.tensor([[0, 3]] * count, device=DEVICE,
                              dtype=torch.int32).view(-1, 2))  # fmt: skip
            sent = one.dispatch(Activations(x), routing, ForwardStep((), (), tokens_per_rank=counts))
            rows.append(len(sent.values))
            assert torch.equal(one.combine(sent.values, sent), 2 * x)
        one.close()
        one.close()
        return rows

    assert run_mesh(Mesh(data=2, expert_parallel=True), work) == [[8, 5, 6, 0]] * 2
