"""The contract of a platform's streams and memory."""

from __future__ import annotations

import gc
import os
import time

import numpy as np
import pytest
import torch
from torch import Tensor

from frame.core.interfaces.held_memory import HeldPiece
from frame.core.interfaces.platform import SMALL_COPY_BYTES, HostCopy, MemorySnapshot, Platform, Streams

from .platform_checks import PlatformChecks


class StreamChecks(PlatformChecks):
    """Copies arrive in order and whole; memory is counted."""

    @pytest.mark.parametrize("dtype", ["int32", "int64", "float32", "bool", "uint8"])
    def test_staged_arrays_arrive_and_may_be_reused(self, platform: Platform, dtype: str) -> None:
        streams = platform.streams()
        given = (np.arange(999) % 2 if dtype == "bool" else np.arange(999) % 200).astype(dtype)
        want = given.copy()
        tensors = []
        for _ in range(3):
            tensors.append(streams.stage(given))
            given[:] = 0  # the caller may do so at once
            given[:] = want
        given[:] = 0
        streams.synchronize()
        for tensor in tensors:
            assert tensor.device.type == platform.device_type
            assert tensor.dtype == getattr(torch, dtype), f"an array of {dtype} became {tensor.dtype}"
            assert np.array_equal(tensor.cpu().numpy(), want), "stage must copy the array before it returns"
        assert streams.stage(np.zeros((0, 3), np.int32)).shape == (0, 3), "an empty array must arrive as one"

    def test_arrays_are_staged_into_memory_that_is_there(self, platform: Platform) -> None:
        streams = platform.streams()
        memory = torch.zeros(6, dtype=torch.int32, device=platform.device)
        part, given = memory[2:].view(2, 2), np.array([[1, 2], [3, 4]], np.int32)
        streams.stage_into(part, given)
        given.fill(9)
        streams.synchronize()
        assert memory.tolist() == [0, 0, 1, 2, 3, 4], "stage_into must copy the array, into that memory, and at once"

    def test_what_is_small_is_copied_out_before_it_is_overwritten(self, platform: Platform) -> None:
        streams, copies = platform.streams(), []
        memory = torch.zeros(SMALL_COPY_BYTES // 8, dtype=torch.int32, device=platform.device)
        for _ in range(5):
            memory.add_(1)
            copies.append(streams.copy_out({"one": memory, "other": memory}))
        for number, copy in enumerate(copies, 1):
            for array in copy.wait().values():
                assert (array == number).all(), "copy_out must read small tensors before later work writes to them"

    def test_copies_come_out_after_the_work_before(self, platform: Platform) -> None:
        streams = platform.streams()
        made = {"sum": self.work(streams, 50), "empty": torch.zeros(0, dtype=torch.int32, device=platform.device)}
        copy = streams.copy_out(made)
        want = made["sum"].cpu().numpy().copy()
        del made
        assert isinstance(copy, HostCopy), f"copy_out must give a HostCopy, gave {type(copy).__name__}"
        assert isinstance(copy.ready(), bool)
        for _ in range(2):
            arrays = copy.wait()
            assert set(arrays) == {"sum", "empty"}, f"the copy holds {sorted(arrays)}"
            assert np.array_equal(arrays["sum"], want), "the copy differs from the tensor"
            assert arrays["empty"].shape == (0,)
        assert copy.ready(), "a copy that was waited for is ready"

    def test_many_copies_may_be_under_way(self, platform: Platform) -> None:
        streams = platform.streams()
        copies = [streams.copy_out({"x": self.work(streams, index)}) for index in range(20)]
        wanted = [self.work(streams, index).cpu().numpy() for index in range(20)]
        for index in reversed(range(20)):
            assert np.array_equal(copies[index].wait()["x"], wanted[index]), "copies are mixed up"

    def test_ready_turns_true_without_waiting(self, platform: Platform) -> None:
        streams = platform.streams()
        copy = streams.copy_out({"x": self.work(streams, 3)})
        streams.synchronize()
        deadline = time.monotonic() + 10
        while not copy.ready():
            assert time.monotonic() < deadline, "a copy was not ready 10 s after the device had finished"
            time.sleep(0.001)

    def test_a_mark_of_a_side_queue_is_passed_once_its_work_is_done(self, platform: Platform) -> None:
        streams = platform.streams()
        side = streams.side_queue()
        made = [self.work(streams, 0)]
        streams.synchronize()
        assert side.mark().done(), "a queue that was given nothing has nothing to do"
        for _ in range(3):
            side.run(lambda: made.append(made[-1] + 1))
            mark = side.mark()
            mark.wait()
            assert mark.done(), "a mark that was waited for is passed"
        side.join()
        assert torch.equal(made[-1], made[0] + 3), "a mark was passed before the work before it was done"
        side.close()

    def test_the_main_queue_waits_for_a_mark(self, platform: Platform) -> None:
        streams = platform.streams()
        side = streams.side_queue()
        memory = torch.zeros(1 << 18, dtype=torch.int32, device=platform.device)

        def write() -> None:
            time.sleep(0.02)
            for _ in range(50):
                memory.add_(1)

        for number in range(1, 4):
            side.run(write)
            mark = side.mark()
            side.run(lambda: time.sleep(0.01))
            mark.before_main()
            found = memory.clone()
            side.join()
            streams.synchronize()
            if not (right := bool((found == 50 * number).all())):
                break
        side.close()
        assert right, "work behind before_main ran before what the mark is behind"

    def test_what_fails_on_a_side_queue_is_told_once(self, platform: Platform) -> None:
        side = platform.streams().side_queue()

        def fail() -> None:
            raise ValueError("no such block")

        told = 0
        for tell in (lambda: side.run(fail), lambda: side.mark().wait(), side.join):
            try:
                tell()
            except ValueError:
                told += 1
        assert told == 1, f"an error was raised {told} times"
        side.close()

    def test_pinned_memory_is_bytes_of_the_host(self, platform: Platform) -> None:
        memory = platform.memory().pinned(3 << 10)
        assert (memory.device.type, memory.dtype, memory.shape) == ("cpu", torch.uint8, (3 << 10,))
        there = torch.full((3 << 10,), 7, dtype=torch.uint8, device=platform.device)
        memory.copy_(there, non_blocking=True)
        platform.streams().synchronize()
        assert (memory == 7).all()

    def test_held_memory_is_found_by_its_files(self, platform: Platform) -> None:
        """What another process would map: the same parts, with what was written; memory behind them is new."""
        first = platform.held_memory()
        if first is None:
            pytest.skip("the platform has no memory that outlives a process")
        sizes = (1000, 3 << 20, 5)
        for number, size in enumerate(sizes):
            part = first.take(size)
            assert (part.dtype, tuple(part.shape)) == (torch.uint8, (size,))
            assert (part.device, part.data_ptr() % first.ALIGNMENT) == (platform.device, 0)
            part.fill_(number + 1)
        platform.streams().synchronize()
        pieces = [HeldPiece(os.dup(piece.descriptor), piece.num_bytes) for piece in first.pieces()]
        assert sum(piece.num_bytes for piece in pieces) >= sum(sizes)
        first.release()
        first.release()
        del part, first
        gc.collect()
        second = self.make().held_memory(pieces)
        assert second is not None
        for number, size in enumerate(sizes):
            assert (second.take(size) == number + 1).all(), f"part {number} is another"
        second.take(1 << 20).fill_(9)
        platform.streams().synchronize()
        assert all(piece.num_bytes > 0 for piece in second.pieces())
        second.release()

    def test_memory_is_counted(self, platform: Platform) -> None:
        memory = platform.memory()
        before = memory.snapshot()
        assert isinstance(before, MemorySnapshot)
        assert 0 <= before.free <= before.total, f"{before}: free must lie between 0 and total"
        assert 0 <= before.held <= before.peak, f"{before}: held must be at most peak"
        sizes = [memory.kv_bytes(before, share, 1 << 20, 1 << 30) for share in (0.01, 0.5, 0.9)]
        assert all(isinstance(size, int) and size >= 0 for size in sizes), f"kv_bytes gave {sizes}"
        assert sizes == sorted(sizes), f"a larger share of the memory gave a smaller cache: {sizes}"
        assert memory.kv_bytes(before, 0.5, before.total, 1 << 30) == 0, "no room is left beside such weights"

    def test_pools_wrap_allocations(self, platform: Platform) -> None:
        memory = platform.memory()
        for tag in ("weights", "kv_cache"):
            with memory.pool(tag):
                kept = torch.ones(8, device=platform.device)
            assert kept.sum().item() == 8
        for call in (lambda: memory.sleep(("weights",)), lambda: memory.wake(("weights", "kv_cache"))):
            try:
                call()
            except NotImplementedError as error:
                text = str(error)
                assert "platform" in text, f"say that this platform cannot, got {text!r}"

    @staticmethod
    def work(streams: Streams, seed: int) -> Tensor:
        """Some work on the device, of integers."""
        value = streams.stage(np.arange(2000, dtype=np.int64) + seed)
        for _ in range(20):
            value = value * 3 + 1
        return value
