"""A platform: a kind of device, its memory, its queues to and from the host, and the fast versions of the ops.

The runner reaches the device only through this interface, `Steps` and the `Ops` that it hands out, so that a new
platform changes nothing else. Knows no model and no request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from .collectives import UnconnectedCollectives
from .loader import fill_each
from .platform_steps import Steps

if TYPE_CHECKING:
    from ..ops import Ops
    from .collectives import Collectives
    from .held_memory import HeldMemory, HeldPiece
    from .mesh import Placement
    from .setup import PlatformSetup


#: Most bytes of tensors that `Streams.copy_out` reads before work that is launched later may write to them.
SMALL_COPY_BYTES = 64 << 10


@dataclass(frozen=True)
class PlatformSpec:
    """What an engine asks of a platform: the type of weights and activations, the number of workers, equal bits."""

    dtype: torch.dtype
    world_size: int = 1
    deterministic: bool = False


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes of device memory: all there is, what is free, what this process holds now, and the most it ever held."""

    total: int
    free: int
    held: int
    peak: int


class HostCopy(ABC):
    """Device tensors on their way to the host."""

    @abstractmethod
    def ready(self) -> bool:
        """Whether `wait` would return at once."""

    @abstractmethod
    def wait(self) -> dict[str, np.ndarray]:
        """Blocks until the copy has arrived; returns the arrays by the names of the tensors. May be called again."""


class Mark:
    """A place in a queue: all that it was given before. This one is passed already."""

    def done(self) -> bool:
        """Whether `wait` would return, or raise, at once."""
        return True

    def wait(self) -> None:
        """Blocks until the queue has done all that; raises what the work given since the mark before raised."""

    def before_main(self) -> None:
        """Has work that is launched on the main queue from now on run after all that; may raise as `wait` does."""
        self.wait()


class SideQueue:
    """Runs work beside the steps, in the order in which it is given; here before `run` returns."""

    def run(self, work: Callable[[], None]) -> None:
        """Has `work` done once all that the main queue holds now is done."""
        work()

    def join(self) -> None:
        """What the main queue is given from now on runs after all that `run` was given; raises what no mark raises."""

    def mark(self) -> Mark:
        """A mark behind all that `run` was given, and so behind what the main queue held at the last `run`."""
        return Mark()

    def close(self) -> None:
        """Ends the queue. May be called twice."""


class Streams(ABC):
    """The queue of launched work, and copies in both directions that keep its order."""

    @abstractmethod
    def stage(self, array: np.ndarray) -> Tensor:
        """Copies a host array to the device without waiting; the caller may change the array at once."""

    def stage_into(self, out: Tensor, array: np.ndarray) -> None:
        """As `stage`, into the contiguous device tensor `out`, which has the array's type and number of elements."""
        out.copy_(self.stage(array).view(out.shape))

    @abstractmethod
    def copy_out(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Starts copying device tensors to the host, after all work launched so far; keeps them alive until it is done.

        Work that is launched later may write to tensors of at most SMALL_COPY_BYTES together: these are read before it.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks until the device has finished all launched work."""

    def side_queue(self) -> SideQueue:
        """A queue beside the main one, on which weights move while steps run; by default work is done at once."""
        return SideQueue()

    def fill(self, pieces: Iterable[tuple[Tensor, Callable[[], Tensor]]]) -> None:
        """For each pair of a device tensor and a function, copies the host tensor that the function reads, casting it.

        Called to load weights. A platform may read and copy several at a time; all are in place when it returns. Raises
        what a function raised.
        """
        fill_each(pieces)


class Memory(ABC):
    """The device's memory: how much there is, and pools whose content can be dropped by tag.

    The worker calls it at the start, and for `sleep` and `wake_up` of the engine.
    """

    #: whether the worker runs the largest step once before it asks `kv_bytes`, so that the counters include its memory
    needs_profile: bool = False
    #: whether weights may be kept in host memory (`pinned`), and copied from there by side queues
    offloads: bool = False

    @abstractmethod
    def snapshot(self) -> MemorySnapshot:
        """Reads the counters now."""

    @abstractmethod
    def kv_bytes(self, start: MemorySnapshot, utilization: float, weights_bytes: int, full_bytes: int) -> int:
        """Returns the bytes that the KV cache may take, when the model is loaded and the largest step was run.

        `start` was taken before loading; `utilization` is the share of all memory that this engine may use.
        `full_bytes` is what all requests at full length would need together; more only serves the prefix cache.
        """

    def lacks(self, start: MemorySnapshot, utilization: float, needed_bytes: int) -> str | None:
        """None where a worker has room here, else one sentence: which device, how much is free, how much is needed.

        Asked before the model is made, and again before its weights are read. `needed_bytes` is what is known by then
        to be needed; where the KV cache has no size of its own the worker also takes `utilization` of all memory, else
        that is 0. By default there is room.
        """
        del start, utilization, needed_bytes
        return None

    def pool(self, tag: str) -> AbstractContextManager[Any]:
        """A context whose allocations belong to `tag` ("weights", "kv_cache"); the default has no pools."""
        del tag
        return nullcontext()

    def claim(self, tag: str, tensors: Sequence[Tensor]) -> None:
        """Says which tensors belong to `tag`, for platforms that free them one by one; the default ignores it."""
        del tag, tensors

    def pinned(self, num_bytes: int) -> Tensor:
        """Host memory, uint8 [num_bytes], which the device can copy beside other work; by default any memory."""
        return torch.empty(num_bytes, dtype=torch.uint8)

    def sleep(self, keep: tuple[str, ...]) -> None:
        """Copies the pools named in `keep` to the host, and frees all pools; the default raises.

        Where it raises, nothing is freed.
        """
        raise NotImplementedError("sleep is not available on this platform")

    def wake(self, tags: tuple[str, ...]) -> None:
        """Allocates the pools of `tags` again, with the content of those that were kept; the default raises.

        Where it raises, it is called again later.
        """
        raise NotImplementedError("wake_up is not available on this platform")


class Platform(ABC):
    """One kind of device. Built as `Class(setup, options)` in each worker process."""

    #: torch's name of the device type: "cpu", "cuda", …
    device_type: str
    #: `max_num_seqs` and `max_num_batched_tokens` where the user sets none
    default_num_seqs: int = 128
    default_num_batched_tokens: int = 2048

    def __init__(self, setup: PlatformSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.local_rank: int = setup.placement.local_rank

    @classmethod
    @abstractmethod
    def probe(cls) -> str | None:
        """None when this machine has a usable device, else why not. Takes no device memory."""

    @classmethod
    def num_devices(cls) -> int | None:
        """Devices of this machine, each for one worker; None, as by default, where workers share one."""
        return None

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this worker."""

    @abstractmethod
    def supports(self, spec: PlatformSpec) -> str | None:
        """None when this platform can serve `spec`, else every reason against it, joined by "; "."""

    def auto_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """The dtype that `dtype="auto"` means for weights stored as `checkpoint`."""
        return checkpoint

    @abstractmethod
    def ops(self) -> Ops:
        """The ops of this device, always the same object; an op that it does not override is `frame.ops`' reference."""

    @abstractmethod
    def streams(self) -> Streams:
        """The queue of this device, and copies to and from it."""

    @abstractmethod
    def memory(self) -> Memory:
        """The memory counters and pools of this device."""

    def held_memory(self, pieces: Sequence[HeldPiece] = ()) -> HeldMemory | None:
        """Memory for weights that outlives this process, or that of `pieces`, whose files it owns from now on.

        Called at most once, before `Memory.snapshot`; from then on `Memory` counts it as what this worker holds. By
        default there is none. Raises `OSError` or `RuntimeError` where it cannot be had.
        """
        del pieces
        return None

    def collectives(self, placement: Placement) -> Collectives:
        """Finds the other workers of `placement.mesh`; called once, and only where there are others.

        Raises `TimeoutError` when they do not come. Platforms whose `supports` refuses several workers need it not.
        """
        raise NotImplementedError(f"{type(self).__name__} has no collectives for {placement.mesh.size} workers")

    def unconnected_collectives(self, placement: Placement) -> Collectives:
        """As `collectives`, without the other workers, for a stand-in on which `Kernels.compile_ahead` rehearses steps.

        Its groups launch what those of `collectives` do; results have the right shapes and meaningless values. By
        default they launch nothing.
        """
        return UnconnectedCollectives(placement.rank)

    def steps(self) -> Steps:
        """How steps run on this device; called once. By default at the sizes of their plans, and eager."""
        return Steps()
