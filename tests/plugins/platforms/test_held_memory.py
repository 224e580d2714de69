"""Memory that files keep: of the host, and of a CUDA device whose driver is a fake one."""

from __future__ import annotations

import gc
import os

import pytest
import torch

from frame.interfaces import HeldPiece
from frame.plugins.platforms.held_host import HostHeldMemory
from tests.plugins.platforms.fake_driver import FakeDriver, view_of

pytest.importorskip("triton")
held = pytest.importorskip("frame.plugins.platforms.cuda.held_memory")
SIZES = (1000, 40 << 20, 3, 70 << 20)


class OnFake(held.CudaHeldMemory):
    def _view(self, address, num_bytes):
        return view_of(address, num_bytes)


def made(kind, pieces=()):
    if kind == "host":
        return HostHeldMemory(pieces)
    return OnFake(torch.device("cpu"), 1 << 30, pieces, FakeDriver())


def sent(pieces):
    """As another process gets them."""
    return [HeldPiece(os.dup(piece.descriptor), piece.num_bytes) for piece in pieces]


def filled(memory):
    parts = [memory.take(size) for size in SIZES]
    for number, part in enumerate(parts):
        part[0], part[-1] = 10 + number, 20 + number
    return parts


@pytest.mark.parametrize("kind", ["host", "cuda"])
def test_another_process_finds_what_was_written(kind):
    first = made(kind)
    filled(first)
    kept = sent(first.pieces())
    assert sum(piece.num_bytes for piece in kept) >= sum(SIZES)
    first.release()
    first.release()
    del first
    gc.collect()
    second = made(kind, sent(kept))
    parts = [second.take(size) for size in SIZES]
    assert [(int(part[0]), int(part[-1])) for part in parts] == [(10 + n, 20 + n) for n in range(len(SIZES))]
    assert [part.data_ptr() % second.ALIGNMENT for part in parts] == [0] * len(SIZES)
    more = second.take(100 << 20)
    more.fill_(7)
    grown = sent(second.pieces())
    assert sum(piece.num_bytes for piece in grown) >= sum(SIZES) + (100 << 20)
    second.release()
    third = made(kind, grown)
    assert [int(third.take(size)[0]) for size in (*SIZES, 100 << 20)][-2:] == [13, 7]
    third.release()
    for piece in kept:
        os.close(piece.descriptor)


def test_memory_of_the_device_is_given_back():
    driver = FakeDriver()
    memory = OnFake(torch.device("cpu"), 1 << 30, (), driver)
    memory.take(300 << 20)
    assert memory.num_bytes == 512 << 20
    pieces = memory.pieces()
    assert not driver.handles  # files and mappings keep it
    assert [piece.num_bytes >> 20 for piece in pieces] == [32, 32, 64, 128, 256]
    assert sum(driver.accessible.values()) == driver.mapped == memory.num_bytes
    memory.release()
    del memory
    gc.collect()
    assert driver.mapped == 0


class Full(FakeDriver):
    def cuMemMap(self, *arguments):
        return 1


def test_memory_that_cannot_be_mapped_is_given_back():
    first = made("cuda")
    first.take(1)
    pieces = sent(first.pieces())
    first.release()
    for given in (pieces, ()):
        driver = Full()
        with pytest.raises(held.PeerMemoryError):
            OnFake(torch.device("cpu"), 1 << 30, given, driver)
        assert not driver.handles


def test_a_device_that_cannot_says_so():
    with pytest.raises(held.PeerMemoryError, match="cannot be exported as files"):
        OnFake(torch.device("cpu"), 1 << 30, (), FakeDriver(exports=False))
    memory = OnFake(torch.device("cpu"), 1 << 30, (), FakeDriver(100 << 20))
    with pytest.raises(torch.OutOfMemoryError, match="left for weights"):
        memory.take(200 << 20)
    memory.release()
    memory = OnFake(torch.device("cpu"), 1 << 20, (), FakeDriver())
    with pytest.raises(torch.OutOfMemoryError, match="no more than"):
        memory.take(300 << 20)
    memory.release()


def test_the_kv_cache_takes_what_held_weights_leave(monkeypatch):
    """As much in the engine that loads as in the next one, which finds them: they count once."""
    from frame.plugins.platforms.cuda import memory as module

    used = {"torch": 0, "others": 3 << 30}
    total = 64 << 30
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: used["torch"])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: used["torch"] + (1 << 30))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: used["torch"])
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a device")
    free = lambda: total - used["torch"] - used["others"]  # noqa: E731
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free(), total))

    class Held:
        num_bytes = found_bytes = 0

    def room(held_before, held_after, weights_in_torch):
        used.update(torch=0, others=(3 << 30) + held_before)
        memory, memory_held = module.CudaMemory(torch.device("cuda", 0)), Held()
        memory.held = memory_held
        memory_held.num_bytes = memory_held.found_bytes = held_before
        start = memory.snapshot()
        assert memory.lacks(start, 0.9, 0) is None
        memory_held.num_bytes = held_after
        used.update(torch=weights_in_torch, others=(3 << 30) + held_after)
        assert memory.snapshot().held == 16 << 30
        return memory.kv_bytes(start, 0.9, 16 << 30, 0)

    def beside(takes_held):
        """The cache's bytes beside 512 MiB of weights, where libraries take 500 MiB after the start."""
        memory = module.CudaMemory(torch.device("cuda", 0))
        if takes_held:
            memory.held = OnFake(torch.device("cpu"), 1 << 30, (), FakeDriver())
        mapped = lambda: memory.held.num_bytes if takes_held else 0  # noqa: E731
        used.update(torch=0, others=(3 << 30) + mapped())
        start = memory.snapshot()
        if takes_held:
            memory.held.take(500 << 20)
        used.update(torch=0 if takes_held else 512 << 20, others=(3 << 30) + (500 << 20) + mapped())
        return memory.kv_bytes(start, 0.9, 512 << 20, 0)

    assert beside(True) == beside(False)
    weights = 16 << 30
    assert room(0, 0, weights) == room(0, weights, 0) == room(weights, weights, 0)
