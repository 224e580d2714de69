"""Sums of two ranks by copies: kernels with both ranks in one process, then two processes, on one GPU if need be."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch

from frame.core.ops import layers
from frame.core.parallel.rendezvous import Rendezvous
from frame.interfaces import Mesh, Placement
from frame.kernels import peer_copies as kernels

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] if INTERPRETED else [torch.float32, torch.float16, torch.bfloat16]


class Norm:
    """A norm's weight with the reference."""

    def __init__(self, weight: torch.Tensor, offset: float = 0.0) -> None:
        self.given = (weight, 1e-6, offset)

    def __call__(self, x, residual):
        return layers.add_rms_norm(x, residual, *self.given)


def make_buffers() -> list[kernels.CopyBuffers]:
    """Buffers of two ranks on this device."""
    received = torch.zeros(2, 1 << 18, dtype=torch.uint8, device=DEVICE)
    signals = torch.zeros(2, 2, dtype=torch.int64, device=DEVICE)
    made = []
    for rank in range(2):
        theirs = torch.tensor([signals[1 - rank].data_ptr()], device=DEVICE)
        state = torch.zeros(2, dtype=torch.int64, device=DEVICE)
        made.append(kernels.CopyBuffers(received[rank], signals[rank], theirs, state))
    return made


def inputs(call: int, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> list[torch.Tensor]:
    """Both ranks' values, and a residual that both have."""
    torch.manual_seed(call)
    return [torch.randn(shape).to(dtype).to(device) for _ in range(3)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_many_sums_of_all_shapes_equal_the_reference(dtype: torch.dtype, offset: float) -> None:
    buffers = make_buffers()
    for call, (shape, normed) in enumerate(
        [((3, 256), True), ((5, 5000), False), ((7, 100), True), ((1, 2), False), ((20, 512), True), ((3, 256), False)]
    ):
        *given, residual = inputs(call, shape, dtype, DEVICE)
        norm = Norm(torch.rand(shape[1]).to(dtype).to(DEVICE), offset)
        total = (given[0].float() + given[1].float()).to(dtype)
        for rank, own in enumerate(buffers):
            kernels.await_taken(own)
            other = buffers[1 - rank].received.view(dtype)
            other[: given[rank].numel()] = given[rank].flatten()
            kernels.tell_arrived(own)
        for x, own in zip(given, buffers, strict=True):
            if normed:
                out, carried = kernels.add_received_normed(x, residual, norm.given, own)
                expected, whole = norm(total, residual)
                assert torch.equal(carried, whole)
                torch.testing.assert_close(out, expected, atol=2e-2 if dtype == torch.bfloat16 else 2e-3, rtol=2e-2)
            else:
                assert torch.equal(kernels.add_received(x, own, torch.empty_like(x)), total)
        assert [own.state.tolist() for own in buffers] == [[call + 1, 0]] * 2
        assert [own.signals.tolist() for own in buffers] == [[call + 1, call + 1]] * 2


def test_rehearsals_wait_for_nobody_and_change_nothing() -> None:
    own = make_buffers()[0]
    x = torch.ones(4, 64, device=DEVICE)
    kernels.await_taken(own, rehearsed=True)
    kernels.tell_arrived(own, rehearsed=True)
    kernels.add_received(x, own, x, rehearsed=True)
    kernels.add_received_normed(x, x, (torch.ones(64, device=DEVICE), 1e-6, 0.0), own, rehearsed=True)
    assert (own.state.tolist(), own.signals.tolist(), x.unique().tolist()) == ([0, 0], [0, 0], [1.0])


@pytest.mark.skipif(INTERPRETED, reason="copies need a GPU")
def test_two_processes_sum_eagerly_and_in_a_replayed_graph() -> None:
    rendezvous, context = Rendezvous(), multiprocessing.get_context("spawn")
    ranks = [context.Process(target=run_rank, args=(rank, rendezvous.address)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(100)
        rank.kill()
    assert [rank.exitcode for rank in ranks] == [0, 0]


def run_rank(rank: int, address: str) -> None:
    """One rank: sums in parts and whole, then a graph of three sums that is replayed."""
    from frame.plugins.platforms.cuda.peer_copies import COPIED_BYTES, PeerCopies
    from frame.plugins.platforms.cuda.peer_memory import PeerMemory
    from frame.plugins.platforms.torch_collectives import TorchCollectives

    device = torch.device("cuda", rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    placement = Placement(rank=rank, local_rank=rank, mesh=Mesh(tensor=2), rendezvous=address)
    collectives = TorchCollectives(placement)
    host = collectives.host("tensor", [0, 1])
    memory = PeerMemory(device, rank, 2, host, copied_bytes=COPIED_BYTES)
    copies = PeerCopies(memory)
    norm = Norm(torch.rand(4096, device=device, dtype=torch.bfloat16))

    def summed(x: torch.Tensor, residual: torch.Tensor, parts: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert copies.takes(x)
        size = len(x) // max(parts, 1)
        for part in range(parts):
            copies.begin(x, slice(part * size, len(x) if part == parts - 1 else (part + 1) * size))
        return copies.all_reduce_normed(x, residual, norm, rehearsed=False)

    def check(found: tuple[torch.Tensor, torch.Tensor], given: list[torch.Tensor]) -> None:
        out, total = norm((given[0].float() + given[1].float()).bfloat16(), given[2])
        assert torch.equal(found[1], total)
        torch.testing.assert_close(found[0], out, atol=2e-2, rtol=2e-2)

    for call, (rows, parts) in enumerate([(4096, 4), (5, 0), (1001, 3), (16384, 2), (300, 1)]):
        given = inputs(call, (rows, 4096), torch.bfloat16, str(device))
        check(summed(given[rank], given[2], parts), given)
    other = inputs(9, (333, 7), torch.float16, str(device))
    assert torch.equal(copies.all_reduce(other[rank], rehearsed=False), (other[0].float() + other[1].float()).half())

    fixed = [torch.empty(700, 4096, dtype=torch.bfloat16, device=device) for _ in range(3)]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        first = summed(fixed[rank], fixed[2], 2)
        second = summed(fixed[rank] * 1, fixed[2], 0)
        third = summed(first[1], second[1], 3)
    for replay in range(8):
        given = inputs(100 + replay, (700, 4096), torch.bfloat16, str(device))
        for place, value in zip(fixed, given, strict=True):
            place.copy_(value)
        graph.replay()
        check(first, given)
        check(second, given)
        total = norm((given[0].float() + given[1].float()).bfloat16(), given[2])[1]
        check(third, [total, total, total])
    torch.cuda.synchronize()
    host.barrier()
    memory.close()
    collectives.close()
