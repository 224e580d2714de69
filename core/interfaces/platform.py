"""A platform: the device, its memory, its queues, its graphs, and the fast versions of the ops.

The runner reaches the device only through this interface and the `Ops` it hands out, so a new platform is one file.
Knows no model and no request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from .loader import fill_each

if TYPE_CHECKING:
    from ..ops import Ops
    from ..parallel.group import ProcessGroup
    from .model import ForwardStep, Model
    from .step import StepPlan


#: Of tensors that `Streams.copy_out` reads before work launched later may write to them.
SMALL_COPY_BYTES = 64 << 10


@dataclass(frozen=True)
class PlatformSpec:
    """What the engine will ask of a platform; `supports` answers whether it can."""

    dtype: torch.dtype
    world_size: int = 1
    deterministic: bool = False


@dataclass(frozen=True)
class MemorySnapshot:
    """Bytes of the device at one moment: all of it, what is free, what this process holds and the most it ever held."""

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
        """Blocks until the copy has arrived, and returns it by name. May be called again."""


class Streams(ABC):
    """Ordered queues between host and device."""

    @abstractmethod
    def stage(self, array: np.ndarray) -> Tensor:
        """Copies a host array to the device without waiting; the array may be reused by the caller at once."""

    def stage_into(self, out: Tensor, array: np.ndarray) -> None:
        """As `stage`, into device memory that is there: `out` has the array's type and as many elements, contiguous."""
        out.copy_(self.stage(array).view(out.shape))

    @abstractmethod
    def copy_out(self, tensors: Mapping[str, Tensor]) -> HostCopy:
        """Starts copying device tensors to the host, after all work launched so far; holds them until it is done.

        Work launched later may write to them where they have at most SMALL_COPY_BYTES together: they are read before.
        """

    @abstractmethod
    def synchronize(self) -> None:
        """Blocks until the device has finished all launched work."""

    def fill(self, pieces: Iterable[tuple[Tensor, Callable[[], Tensor]]]) -> None:
        """For each pair copies what the function reads, a host tensor, into the tensor of its shape, casting.

        Called for weights. A platform may read and copy several at a time; all are there when it returns. Raises what
        a function raised.
        """
        fill_each(pieces)


class Memory(ABC):
    """The device's memory: how much there is, and pools whose content can be dropped by tag.

    `needs_profile`: the largest step is run once before `kv_bytes` is asked, so that the counters know it.
    """

    needs_profile: bool = False

    @abstractmethod
    def snapshot(self) -> MemorySnapshot:
        """Reads the counters now."""

    @abstractmethod
    def kv_bytes(self, start: MemorySnapshot, utilization: float, weights_bytes: int, full_bytes: int) -> int:
        """Bytes that the KV cache may take, after `start` (taken before loading) and a profiling step.

        `full_bytes` is what every request at full length would need together; more only serves the prefix cache.
        """

    def pool(self, tag: str) -> AbstractContextManager[Any]:
        """Allocations made inside belong to `tag` ("weights", "kv_cache"); the default has no pools."""
        del tag
        return nullcontext()

    def claim(self, tag: str, tensors: Sequence[Tensor]) -> None:
        """Names the tensors of `tag`, for platforms that free them one by one; the default has no use for it."""
        del tag, tensors

    def sleep(self, keep: tuple[str, ...]) -> None:
        """Moves pools named in `keep` to the host and drops the rest; the default cannot."""
        raise NotImplementedError("sleep is not available on this platform")

    def wake(self, tags: tuple[str, ...]) -> None:
        """Brings pools back; the default cannot."""
        raise NotImplementedError("wake_up is not available on this platform")


@dataclass(frozen=True)
class StepShape:
    """The sizes that a step runs at: real ones, and what they are padded to. `graph` names the graph, None is eager.

    `deterministic`: the step runs on invariant ops, `shared`: its rows attend to shared prefixes apart; either has a
    graph of its own.
    """

    num_tokens: int
    num_rows: int
    padded_tokens: int
    padded_rows: int
    graph: str | None = None
    deterministic: bool = False
    shared: bool = False


class Forward(Protocol):
    """The forward pass of a step over inputs that lie ready. Calling it runs it on what `step` gives."""

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        """Hidden states [T, hidden_size] of the padded tokens."""

    def step(self) -> ForwardStep:
        """The attention plans of this step.

        For Graphs that say `records_inputs` it first fills what the model reads, and the plans, from the step's rows,
        which are all that steps of a shape differ by, and lie where they always do.
        """


class Graphs(ABC):
    """Recorded steps. The null object `EagerGraphs` pads nothing and records nothing."""

    #: for debugging: whether the runner checks, before a recorded step, that what it reads lies where it lay
    checks_inputs: bool = False
    #: whether each `run` calls `forward.step`, or replays a recording that holds it; inputs lie ready before it if not
    records_inputs: bool = False

    @abstractmethod
    def prepare(self, model: Model) -> Model:
        """Called once after loading; may compile. Returns the model to call."""

    @abstractmethod
    def shape(self, plan: StepPlan) -> StepShape:
        """Chooses the sizes for a step; a static-shape platform pads every step here."""

    @abstractmethod
    def run(self, shape: StepShape, forward: Forward) -> Tensor:
        """Runs `forward` (or replays its recording); returns the hidden states, valid until the next run."""

    def records_draws(self, shape: StepShape) -> bool:
        """Whether `run_draw` saves the host work for a step of that shape; the runner draws in its own way if not."""
        del shape
        return False

    def run_draw(self, shape: StepShape, kind: str, draw: Callable[[], Tensor]) -> Tensor:
        """Runs `draw` (or replays its recording) after the step of that shape; returns its result, until the next one.

        Steps of a shape and kind launch the same, on memory at the same addresses. The result has eight bytes a padded
        row; it is copied out before a next step writes to it where that is at most SMALL_COPY_BYTES.
        """
        del shape, kind
        return draw()

    def shapes(self) -> list[StepShape]:
        """Steps that will be or may be recorded, as they run eagerly before; deterministic ones where one may come."""
        return []

    def reserve(self, run_dummy: Callable[[StepShape], None]) -> int:
        """Bytes of the device's memory that all recordings will take; called once, before the KV cache is sized.

        `run_dummy` runs a shape on a cache of two blocks: it may be recorded, but what is must be dropped.
        """
        del run_dummy
        return 0

    def capture(self, run_dummy: Callable[[StepShape], None]) -> bool:
        """Records one more shape, `run_dummy` running it; returns whether more are to be before the first request.

        Called at the start until that is False, and then between two steps where `wanted` and the plan (`capture`) say
        so. Takes about 50 ms at most; what may take longer waits for calls with no step between them. Ends `wanted`
        sooner or later.
        """
        del run_dummy
        return False

    def wanted(self) -> bool:
        """Whether `capture` has something to do: shapes that are left, or that steps met which none was recorded for.

        Depends on nothing but the plans, so that all workers of an engine agree.
        """
        return False

    def drop(self) -> None:
        """Forgets all recordings: what they read has moved. They may be made again."""


class EagerGraphs(Graphs):
    """No recording: every step runs as it is."""

    def prepare(self, model: Model) -> Model:
        return model

    def shape(self, plan: StepPlan) -> StepShape:
        tokens, rows = plan.num_tokens, len(plan.slots)
        shared = bool(plan.prefixes)
        return StepShape(tokens, rows, tokens, rows, deterministic=plan.deterministic, shared=shared)

    def run(self, shape: StepShape, forward: Forward) -> Tensor:
        del shape
        return forward()


class Platform(ABC):
    """One kind of device. Built as `Class(config=…, options=…, local_rank=…)` in each worker process.

    `config` is the frozen `FrameConfig`; `options` the plugin's own pydantic model or None.
    """

    #: torch's name of the device type: "cpu", "cuda", …
    device_type: str
    #: what `max_num_seqs` and `max_num_batched_tokens` are when the user leaves them open
    default_num_seqs: int = 128
    default_num_batched_tokens: int = 2048

    def __init__(self, *, config: Any, options: Any = None, local_rank: int = 0) -> None:
        self.config = config
        self.options = options
        self.local_rank = local_rank

    @classmethod
    @abstractmethod
    def probe(cls) -> str | None:
        """None when this machine has the device, else the reason why it cannot be used. Must not claim memory."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of this worker."""

    @abstractmethod
    def supports(self, spec: PlatformSpec) -> str | None:
        """None, or every reason why this platform cannot serve `spec`, joined by "; "."""

    def auto_dtype(self, checkpoint: torch.dtype) -> torch.dtype:
        """The dtype that `dtype="auto"` means for weights stored as `checkpoint`."""
        return checkpoint

    @abstractmethod
    def ops(self) -> Ops:
        """The ops of this device, always the same object; anything not overridden is the reference in `frame.ops`."""

    @abstractmethod
    def streams(self) -> Streams:
        """Queues to and from this device."""

    @abstractmethod
    def memory(self) -> Memory:
        """Memory counters and pools of this device."""

    def graphs(self) -> Graphs:
        """Recorded steps; eager by default."""
        return EagerGraphs()

    def compile_ahead(self, rehearse: Callable[[Platform], None]) -> None:
        """Called once, before the first memory is asked for; may begin to compile what steps will launch.

        `rehearse(platform)` builds the model and runs steps of every kind on the platform it is given: a stand-in that
        launches nothing, in another process. The default has nothing to compile.
        """
        del rehearse

    def prepare_kernels(self, run: Callable[[], None]) -> None:
        """Called once, before memory is profiled; `run` runs steps of every kind on a tiny cache, and may be called
        several times. The default has nothing to compile and does not call it.
        """
        del run

    def collectives(self, ranks: list[int]) -> ProcessGroup:
        """A process group over `ranks` (global rank numbers) with this device's collectives."""
        from ..parallel.group import SingleGroup

        if len(ranks) != 1:
            raise NotImplementedError(f"platform {self.device_type!r} has no collectives for {len(ranks)} ranks")
        return SingleGroup()
