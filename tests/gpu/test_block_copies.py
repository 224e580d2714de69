"""Copies of many pieces, also under the interpreter; then from the memory of another process, which needs a GPU."""

from __future__ import annotations

import multiprocessing
import os

import pytest
import torch

from frame.kernels.block_copies import CHECKED, copy_pieces

pytestmark = pytest.mark.gpu

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = "cpu" if INTERPRETED else "cuda"


def table_of(pieces: list[tuple[int, ...]]) -> torch.Tensor:
    return torch.tensor([(*piece, 0)[:4] for piece in pieces], dtype=torch.int64, device=DEVICE)


@pytest.mark.parametrize("unit", [1, 2, 4, 8, 16])
def test_pieces_of_any_size_arrive_and_nothing_else_changes(unit: int) -> None:
    torch.manual_seed(unit)
    source = torch.randint(256, (1 << 18,), dtype=torch.uint8).to(DEVICE)
    target = torch.zeros_like(source)
    expected = torch.zeros_like(source)
    pieces, at = [], 0
    for count in (1, 3, 700, 4096, 5000, 1):
        size = count * unit
        begin = len(source) - at - size  # in the opposite order
        pieces.append((source.data_ptr() + begin, target.data_ptr() + at, size))
        expected[at : at + size] = source[begin : begin + size]
        at += size + unit
    copy_pieces(table_of(pieces), max(size for _, _, size in pieces), unit)
    assert torch.equal(target, expected)


def test_more_pieces_than_programs() -> None:
    source = torch.arange(3000 * 2, device=DEVICE).view(3000, 2)
    target = torch.zeros_like(source)
    order = torch.randperm(3000).tolist()
    copy_pieces(table_of([(source[i].data_ptr(), target[j].data_ptr(), 16) for j, i in enumerate(order)]), 16, 16)
    assert torch.equal(target, source[order])


def test_no_pieces_are_no_launch() -> None:
    copy_pieces(torch.zeros(0, 4, dtype=torch.int64, device=DEVICE), 0, 16)


@pytest.mark.parametrize("dtype", sorted(CHECKED, key=str), ids=str)
@pytest.mark.parametrize("unit", [4, 16])
def test_owners_of_values_that_are_not_finite_are_named(dtype: torch.dtype, unit: int) -> None:
    every = torch.arange(256 ** min(dtype.itemsize, 2), dtype=torch.int32)
    bits = {1: every.to(torch.uint8), 2: every.to(torch.int16), 4: every << 16}[dtype.itemsize]
    values = bits.view(dtype).view(-1, 64)
    expected = values.to(torch.float32).isfinite().all(1)
    assert 0 < expected.sum() < len(expected)
    values = values.to(DEVICE)
    target = torch.zeros_like(values)
    finite = torch.ones(len(values), dtype=torch.bool, device=DEVICE)
    size = 64 * dtype.itemsize
    pieces = [(values[i].data_ptr(), target[i].data_ptr(), size, i) for i in range(len(values))]
    copy_pieces(table_of(pieces), size, unit, finite=finite, dtype=dtype)
    assert torch.equal(target.view(torch.uint8), values.view(torch.uint8))
    assert torch.equal(finite.cpu(), expected)


@pytest.mark.skipif(INTERPRETED, reason="pinned memory needs a GPU")
def test_blocks_go_to_pinned_memory_and_come_back() -> None:
    blocks = torch.randn(100, 4096, dtype=torch.bfloat16, device=DEVICE)
    blocks[7, 4095] = float("nan")
    host = torch.zeros(100, 4096, dtype=torch.bfloat16, pin_memory=True)
    finite = torch.ones(10, dtype=torch.bool, pin_memory=True)
    order = torch.randperm(100).tolist()
    out = [(blocks[i].data_ptr(), host[j].data_ptr(), 8192, i // 10) for j, i in enumerate(order)]
    copy_pieces(table_of(out), 8192, 16, programs=8, finite=finite, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    assert torch.equal(host.view(torch.int16), blocks[order].cpu().view(torch.int16))
    assert finite.tolist() == [False] + [True] * 9
    back = torch.zeros_like(blocks)
    into = [(host[j].data_ptr(), back[i].data_ptr(), 8192, 0) for j, i in enumerate(order)]
    copy_pieces(table_of(into), 8192, 16, programs=8)
    assert torch.equal(back.view(torch.int16), blocks.view(torch.int16))


@pytest.mark.skipif(INTERPRETED, reason="handles need a GPU")
def test_blocks_come_from_the_memory_of_another_process() -> None:
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=give, args=(there,))
    process.start()
    try:
        read(here)
        here.send(None)
        process.join(60)
        assert process.exitcode == 0
    finally:
        process.kill()


def give(pipe: multiprocessing.connection.Connection) -> None:
    """Offers a tensor that lies inside a larger piece of the allocator's, until the other side has read it."""
    from frame.kernels.shared_memory import export

    device = torch.device("cuda", 1 % torch.cuda.device_count())
    torch.empty(3 << 10, dtype=torch.uint8, device=device)
    blocks = torch.arange(1 << 20, device=device).view(64, -1)
    torch.cuda.synchronize(device)
    pipe.send((export(blocks), blocks.data_ptr() - blocks.untyped_storage().data_ptr()))
    pipe.recv()


def read(pipe: multiprocessing.connection.Connection) -> None:
    """Reads every second block, from the last one on."""
    from frame.kernels.shared_memory import SharedMemory

    memory = SharedMemory(torch.device("cuda", 0))
    assert pipe.poll(60)
    handle, offset = pipe.recv()
    address, size = memory.open(handle)
    again, _ = memory.open(handle)
    assert (again, size) == (address, 8 << 20)
    found = torch.zeros(32, (1 << 20) // 64, dtype=torch.int64, device="cuda:0")
    length = found.stride(0) * 8
    pieces = [(address + offset + (63 - 2 * i) * length, found[i].data_ptr(), length, 0) for i in range(32)]
    copy_pieces(torch.tensor(pieces, device="cuda:0"), length, 16)
    expected = torch.arange(1 << 20).view(64, -1).flip(0)[::2]
    assert torch.equal(found.cpu(), expected)
    memory.release(handle)
    memory.release(handle)
    assert memory.open(handle)[1] == size


@pytest.mark.skipif(INTERPRETED, reason="handles need a GPU")
@pytest.mark.parametrize("handle", [b"", bytes(80)], ids=["none", "of nothing"])
def test_a_handle_that_opens_nothing_says_why(handle: bytes) -> None:
    from frame.kernels.peer_memory import PeerMemoryError
    from frame.kernels.shared_memory import SharedMemory

    with pytest.raises(PeerMemoryError):
        SharedMemory(torch.device("cuda", 0)).open(handle)
