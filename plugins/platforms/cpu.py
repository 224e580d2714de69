"""The CPU platform: plain torch, host memory, no queues to wait for."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait

import numpy as np
import torch
from torch import Tensor

from frame.interfaces import (
    SMALL_COPY_BYTES,
    Collectives,
    HeldMemory,
    HeldPiece,
    HostCopy,
    Mark,
    Memory,
    MemorySnapshot,
    Placement,
    Platform,
    PlatformSetup,
    PlatformSpec,
    SideQueue,
    Steps,
    Streams,
)
from frame.links.processors import num_processors
from frame.ops import Ops

from .cpu_ops import CpuOps
from .cpu_pages import large_pages_later
from .cpu_steps import RecordedSteps
from .held_host import HostHeldMemory
from .invariant_ops import rows_are_alike
from .options import CpuOptions

#: Without an explicit size the cache takes at most this: CPU memory belongs to other programs too.
DEFAULT_KV_BYTES = 4 << 30


class CpuPlatform(Platform):
    """Everything in host memory. 16-bit checkpoints are widened by "auto": most processors compute float32 faster."""

    device_type = "cpu"

    def __init__(self, setup: PlatformSetup, options: CpuOptions | None = None) -> None:
        super().__init__(setup, options or CpuOptions())
        self._memory = HostMemory()
        self._ops = CpuOps(compiled=self.options.native_kernels)
        threads = setup.num_threads or _fitting_threads()
        if threads is not None:
            torch.set_num_threads(threads)

    @classmethod
    def probe(cls) -> str | None:
        return None

    @property
    def device(self) -> torch.device:
        return torch.device("cpu")

    def supports(self, spec: PlatformSpec) -> str | None:
        reasons = []
        if spec.dtype not in (torch.float32, torch.bfloat16, torch.float16):
            reasons.append(f"dtype {spec.dtype} is not one of float32, bfloat16, float16")
        if spec.deterministic and not rows_are_alike(spec.dtype, self.device):
            reasons.append(f"torch's {spec.dtype} products here depend on a row's place, so none can be deterministic")
        return "; ".join(reasons) or None

    def auto_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        return checkpoint if self.options.native_dtype else torch.float32

    def ops(self) -> Ops:
        return self._ops

    def steps(self) -> Steps:
        setup = self.setup
        alone = setup.placement.mesh.size == 1
        if setup.enforce_eager or setup.serves_adapters or not (alone and self.options.native_kernels):
            return Steps()
        return Steps(graphs=RecordedSteps(self._ops))

    def streams(self) -> Streams:
        return HostStreams()

    def memory(self) -> Memory:
        return self._memory

    def held_memory(self, pieces: Sequence[HeldPiece] = ()) -> HeldMemory:
        self._memory.held = HostHeldMemory(pieces)
        return self._memory.held

    def collectives(self, placement: Placement) -> Collectives:
        from .torch_collectives import TorchCollectives

        return TorchCollectives(placement)


def _fitting_threads() -> int | None:
    """The number of processors, where torch would start more threads; None where torch's or the user's choice stays.

    torch respects the affinity of its process, but not the CPU limit of its container, beyond which threads only wait.
    """
    if any(name in os.environ for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")):
        return None
    processors = num_processors()
    return processors if torch.get_num_threads() > processors else None


def available_bytes() -> int:
    """Bytes of host memory that processes may still take, counting what the kernel would give back of file caches."""
    with open("/proc/meminfo") as file:
        sizes = dict(line.split(":") for line in file)
    return int(sizes.get("MemAvailable", sizes["MemFree"]).split()[0]) << 10


class Arrived(HostCopy):
    """A copy that is done already."""

    def __init__(self, arrays: dict[str, np.ndarray]) -> None:
        self._arrays = arrays

    def ready(self) -> bool:
        return True

    def wait(self) -> dict[str, np.ndarray]:
        return self._arrays


class SideMark(Mark):
    """Behind `given`, and behind what a thread had been given before: `last`."""

    def __init__(self, given: list[Future[None]], last: Future[None] | None) -> None:
        self._given, self._last = given, last

    def done(self) -> bool:
        return self._last is None or self._last.done()

    def wait(self) -> None:
        if self._last is not None:
            wait([self._last])
        for one in self._given:
            one.result()


class SideThread(SideQueue):
    """A thread of its own, begun with the first work."""

    def __init__(self) -> None:
        self._work: queue.SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._given: list[Future[None]] = []  # since the last mark
        self._last: Future[None] | None = None

    def run(self, work: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._serve, name="frame-side", daemon=True)
            self._thread.start()
        self._last = Future()
        self._given.append(self._last)
        self._work.put((work, self._last))

    def join(self) -> None:
        self.mark().wait()

    def mark(self) -> Mark:
        given, self._given = self._given, []
        return SideMark(given, self._last)

    def close(self) -> None:
        self._work.put(None)

    def _serve(self) -> None:
        while (given := self._work.get()) is not None:
            work, done = given
            try:
                work()
            except BaseException as error:
                done.set_exception(error)
            else:
                done.set_result(None)


class HostStreams(Streams):
    """Host memory is device memory. Inputs are copied; results too, where they are small."""

    def stage(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.copy())

    def stage_into(self, out: Tensor, array: np.ndarray) -> None:
        out.numpy()[...] = array

    def copy_out(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
        if sum(array.nbytes for array in arrays.values()) <= SMALL_COPY_BYTES:
            arrays = {name: array.copy() for name, array in arrays.items()}
        return Arrived(arrays)

    def side_queue(self) -> SideQueue:
        return SideThread()

    def synchronize(self) -> None:
        return


def _place(tensor: Tensor) -> int:
    """A number that tensors of one storage share; packed weights have no storage, and share with none."""
    return id(tensor) if tensor.is_mkldnn else tensor.untyped_storage().data_ptr()


class HostMemory(Memory):
    """The machine's memory, as the kernel reports it. Sleeping frees the memory, since it is host memory already."""

    def __init__(self) -> None:
        #: memory of weights that outlives the process
        self.held: HostHeldMemory | None = None
        self._claimed: dict[str, list[Tensor]] = {}
        self._sizes: dict[str, list[int]] = {}  # of what sleeps, in bytes

    def claim(self, tag: str, tensors: Sequence[Tensor]) -> None:
        self._claimed[tag] = list({_place(tensor): tensor for tensor in tensors}.values())
        for tensor in self._claimed[tag] if tag == "weights" else ():
            if not (tensor.is_mkldnn or tensor.is_meta or self._is_held(tensor)):
                large_pages_later(tensor)

    def sleep(self, keep: tuple[str, ...]) -> None:
        leaving = {tag: one for tag, one in self._claimed.items() if tag not in keep and tag not in self._sizes}
        for tag, tensors in leaving.items():
            if not all(one.untyped_storage().resizable() for one in tensors if not self._is_held(one)):
                raise RuntimeError(f"sleep cannot free {tag}: some of it is mapped from a file")
        for tag, tensors in leaving.items():
            own = [tensor.untyped_storage() for tensor in tensors if not self._is_held(tensor)]
            if self.held is not None and len(own) < len(tensors):
                self.held.empty()
            self._sizes[tag] = [
                -1 if self._is_held(tensor) else tensor.untyped_storage().nbytes() for tensor in tensors
            ]
            for storage in own:
                storage.resize_(0)

    def wake(self, tags: tuple[str, ...]) -> None:
        for tag in tags:
            for tensor, size in zip(self._claimed.get(tag, ()), self._sizes.get(tag, ()), strict=False):
                if size >= 0:  # what is held is zeros already
                    tensor.untyped_storage().resize_(size)
                    tensor.zero_()
            self._sizes.pop(tag, None)  # once all of it is there

    def _is_held(self, tensor: Tensor) -> bool:
        return self.held is not None and self.held.holds(tensor)

    def snapshot(self) -> MemorySnapshot:
        page = os.sysconf("SC_PAGE_SIZE")
        total = page * os.sysconf("SC_PHYS_PAGES")
        free = page * os.sysconf("SC_AVPHYS_PAGES")
        with open("/proc/self/statm") as file:
            held = page * int(file.read().split()[1])
        return MemorySnapshot(total=total, free=free, held=held, peak=held)

    def lacks(self, start: MemorySnapshot, utilization: float, needed_bytes: int) -> str | None:
        """`utilization` is a limit here and claims nothing."""
        del start, utilization
        found = 0 if self.held is None else self.held.found_bytes
        if (available := available_bytes() + found) >= needed_bytes:
            return None
        return (
            f"{available >> 20} MiB of this machine's memory are available, and this worker needs "
            f"{needed_bytes >> 20} MiB: end what else uses it, or lower kv_cache_memory_bytes where that is set"
        )

    def kv_bytes(self, start: MemorySnapshot, utilization: float, weights_bytes: int, full_bytes: int) -> int:
        """What all requests need, within a quarter of what was free, 4 GiB and the configured share of the machine."""
        share = int(start.total * utilization) - weights_bytes
        return max(0, min(DEFAULT_KV_BYTES, start.free // 4, share, full_bytes))
