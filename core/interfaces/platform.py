"""A platform: the device, its memory, its queues, how it runs steps, and the fast versions of the ops.

The runner reaches the device only through this interface and the `Ops` it hands out, so a new platform is one file.
Knows no model and no request.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from .loader import fill_each

if TYPE_CHECKING:
    from ..ops import Ops
    from .model import ForwardStep, Model
    from .setup import PlatformSetup
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


#: The parts of a step; each launch of a step lies in one of them.
Part = Literal["writes", "forward", "draw", "drafts"]
#: What varies in length besides a shape. "runs": writes staged for a table; "values": numbers in those writes, tokens
#: to be counted, entries of token rules; "rows": rows of logits or of hidden states that an op is about; "drafts":
#: drafts of a row that are checked; "logprobs": log-probabilities of a row; "tokens": tokens of a row to be searched.
Length = Literal["runs", "values", "rows", "drafts", "logprobs", "tokens"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class StepShape:
    """The sizes that a step runs at. Steps of one shape, part and kind launch the same.

    `padded_tokens` and `padded_rows` are at least the plan's. `padded_samples`: rows that the draw takes; 0: as many as
    sample. `max_query_len`: the most tokens of a row in this step. `max_seq_len`: the most tokens that a row has after
    it; 0: as many as a request may have. `deterministic`: the step runs on invariant ops. `shared`: its rows attend to
    shared prefixes apart.
    """

    padded_tokens: int
    padded_rows: int
    padded_samples: int = 0
    max_query_len: int = 1
    max_seq_len: int = 0
    deterministic: bool = False
    shared: bool = False


#: The shape of a step without rows: it only writes.
NO_ROWS = StepShape(0, 0)


class Forward(Protocol):
    """The forward pass of a step. Calling it runs it on what `step` gives."""

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        """Hidden states [T, hidden_size] of the padded tokens."""

    def step(self) -> ForwardStep:
        """Builds the inputs from the step's rows, in buffers that never move, and returns the plans of attention.

        The rows are all that steps of a shape differ by, and lie where they always do.
        """


class Shapes(ABC):
    """Chooses the sizes that steps run at. The null object `AnyShape` pads nothing."""

    @abstractmethod
    def choose(self, plan: StepPlan) -> StepShape:
        """The shape of a step with rows. Depends on the plans alone, so that all workers of an engine agree."""

    def pad(self, what: Length, count: int) -> int:
        """How many of `what` a step has in place of `count` (> 0): as many or more.

        The runner fills up with runs of length 0 for slot -1 and values that no run holds, with rows, slots and ids of
        -1 where ops change what they are given, all of which ops leave alone, and else with the last entry again.
        """
        del what
        return count

    def every(self) -> list[StepShape]:
        """Shapes to run before the first request: those that may be recorded or compiled, the largest first."""
        return []


class AnyShape(Shapes):
    """Every step has the sizes of its plan."""

    def choose(self, plan: StepPlan) -> StepShape:
        return StepShape(
            padded_tokens=plan.num_tokens,
            padded_rows=len(plan.slots),
            max_query_len=int(plan.num_scheduled.max()),
            max_seq_len=int((plan.num_computed + plan.num_scheduled).max()),
            deterministic=plan.deterministic,
            shared=bool(plan.prefixes),
        )


class Graphs(ABC):
    """Runs the parts of steps, or replays recordings of them. The null object `EagerGraphs` records nothing."""

    #: for debugging: whether the runner checks, before a recorded step, that what it reads lies where it lay
    checks_inputs: bool = False

    @abstractmethod
    def run(self, shape: StepShape, part: Part, work: Callable[[], Result], kind: str = "") -> Result:
        """Returns what `work` returns, by calling it or by replaying a recording of it for this shape, part and kind.

        All launches of a step lie in `work` of one of its parts. "forward": `work` is a `Forward`. "draw" with a kind:
        steps of a shape and kind launch the same, on memory at the same addresses. Without a kind, and in the other
        parts, what is launched may depend on more than the shape: such work may be traced, and not replayed. A
        recording's result is valid until its part runs again. The result of a draw with a kind has eight bytes a padded
        row; it is copied out before a next step writes to it where that is at most SMALL_COPY_BYTES.
        """

    def records(self, shape: StepShape, part: Part) -> bool:
        """Whether `run` replays that part of a step of the shape, or records it by now."""
        del shape, part
        return False

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
        sooner or later. Never called where an attention backend, the model or a connector needs Python in each step:
        the worker takes `EagerGraphs` then.
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
    """No recording: every part runs as it is."""

    def run(self, shape: StepShape, part: Part, work: Callable[[], Result], kind: str = "") -> Result:
        del shape, part, kind
        return work()


class Kernels(ABC):
    """Compiles what steps launch before the first request. The null object is `NoKernels`."""

    @abstractmethod
    def compile_ahead(self, rehearse: Callable[[Platform], None]) -> None:
        """Called once, before the first memory is asked for; may begin to compile what steps will launch.

        `rehearse(platform)` builds the model and runs steps of every kind on the platform it is given: a stand-in that
        launches nothing, in another process.
        """

    @abstractmethod
    def prepare(self, run: Callable[[], None]) -> None:
        """Called once, before memory is profiled; `run` runs steps of every kind on a tiny cache, and may be called
        several times or not at all.
        """


class NoKernels(Kernels):
    """There is nothing to compile."""

    def compile_ahead(self, rehearse: Callable[[Platform], None]) -> None:
        del rehearse

    def prepare(self, run: Callable[[], None]) -> None:
        del run


class Compiler(ABC):
    """Compiles the model as a whole. The null object `NoCompiler` leaves it as it is."""

    @abstractmethod
    def prepare(self, model: Model, shapes: Shapes) -> Model:
        """Called once, when the weights are in place, before any step; returns the model to call.

        What it returns has the attributes, parameters and methods of `model`; steps have a shape that `shapes` chooses.
        """


class NoCompiler(Compiler):
    """The model runs as it was built."""

    def prepare(self, model: Model, shapes: Shapes) -> Model:
        del shapes
        return model


@dataclass(frozen=True)
class Steps:
    """How a platform runs steps. Every part has a null object; a platform gives those that it has."""

    shapes: Shapes = field(default_factory=AnyShape)
    graphs: Graphs = field(default_factory=EagerGraphs)
    kernels: Kernels = field(default_factory=NoKernels)
    compiler: Compiler = field(default_factory=NoCompiler)


class Platform(ABC):
    """One kind of device. Built as `Class(setup, options)` in each worker process."""

    #: torch's name of the device type: "cpu", "cuda", …
    device_type: str
    #: what `max_num_seqs` and `max_num_batched_tokens` are when the user leaves them open
    default_num_seqs: int = 128
    default_num_batched_tokens: int = 2048

    def __init__(self, setup: PlatformSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.local_rank: int = setup.placement.local_rank

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

    def steps(self) -> Steps:
        """How steps run on this device; called once. By default as they come, unpadded and unrecorded."""
        return Steps()
