"""How a platform runs steps: at which sizes, from CUDA graphs or launch by launch, and what it compiles before.

`Steps` bundles the four parts. Each has a null object, so a platform writes only those that it has. Knows no device.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, TypeVar

from torch import Tensor

if TYPE_CHECKING:
    from .model import ForwardStep, Model
    from .platform import Platform
    from .step import StepPlan

#: The parts of a step, in order: applying the plan's state changes, the forward pass, drawing tokens, proposing drafts.
#: Everything that a step launches on the device lies in one of them.
Part = Literal["writes", "forward", "draw", "drafts"]
#: What varies in length besides a step's shape. "runs": runs of values that are written to tables; "values": the values
#: in them, tokens to be counted, entries of token rules; "rows": rows of logits or hidden states that an op is about;
#: "drafts": drafts of a row that are checked; "logprobs": log-probabilities of a row; "tokens": tokens of a row to be
#: searched.
Length = Literal["runs", "values", "rows", "drafts", "logprobs", "tokens"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class StepShape:
    """The sizes that a step runs at. Steps of one shape, part and kind make the same launches.

    `padded_tokens` and `padded_rows` are at least the plan's numbers of tokens and rows. `padded_samples`: rows that
    the draw takes; 0 for as many as sample. `max_query_len`: the most tokens that one row computes in this step.
    `max_seq_len`: the most tokens that one row has after it; 0 for as many as a request may have. `deterministic`: the
    step runs on invariant ops. `shared`: its rows read prefixes that they share once for many of them. `adapted`: some
    may have an adapter. Where data ranks share experts, `tokens_per_rank` are the padded tokens of each; () where all
    run at this shape.
    """

    padded_tokens: int
    padded_rows: int
    padded_samples: int = 0
    max_query_len: int = 1
    max_seq_len: int = 0
    deterministic: bool = False
    shared: bool = False
    adapted: bool = False
    tokens_per_rank: tuple[int, ...] = ()


#: The shape of a step without rows, which only applies state changes.
NO_ROWS = StepShape(0, 0)


class Forward(Protocol):
    """The forward pass of a step. Calling it runs it on what `step` returns."""

    def __call__(self, step: ForwardStep | None = None) -> Tensor:
        """Returns hidden states [T, hidden_size] of the padded tokens."""

    def step(self) -> ForwardStep:
        """Builds the inputs from the step's rows, in buffers that never move, and returns attention's plans.

        Steps of one shape differ only by the values of these rows, which always lie at the same addresses.
        """


class Shapes(ABC):
    """Chooses the sizes that steps run at. The null object `AnyShape` pads nothing."""

    @abstractmethod
    def choose(self, plan: StepPlan) -> StepShape:
        """Returns the shape of a step with rows, from its plan alone, so that all workers of an engine agree."""

    def join(self, shapes: Sequence[StepShape]) -> StepShape | None:
        """Returns the shape at which data ranks run one step together, given those of the ranks that have rows.

        It must hold each of them. None, which is the default, has each rank run at its own, with `tokens_per_rank`,
        which no graph was captured with. Depends on the shapes alone, so that all ranks agree.
        """
        del shapes
        return None

    def pad(self, what: Length, count: int) -> int:
        """Returns how many of `what` the step handles in place of `count` (> 0): as many or more.

        The runner fills up with runs of length 0 for slot -1 and with values that no run holds; with rows, slots and
        ids of -1 where ops change what they are given. Ops leave all of these alone. Elsewhere it repeats the last
        entry.
        """
        del what
        return count

    def every(self) -> list[StepShape]:
        """Returns the shapes to run before the first request, the largest first: all that are captured or compiled."""
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
            adapted=plan.adapted,
        )


class Graphs(ABC):
    """Runs the parts of steps, or replays CUDA graphs of them. The null object `EagerGraphs` captures nothing."""

    #: whether the runner checks, before a captured step, that its inputs lie at the captured addresses; for debugging
    checks_inputs: bool = False

    @abstractmethod
    def run(self, shape: StepShape, part: Part, work: Callable[[], Result], kind: str = "") -> Result:
        """Returns what `work` returns, by calling it or by replaying the graph of this shape, part and kind.

        The runner calls it for every part of every step. For "forward", `work` is a `Forward`. For "draw" with a kind,
        steps of one shape and kind make the same launches on memory at the same addresses. A draw without a kind and
        the other parts may launch what depends on more than the shape: they may be traced, and not replayed. The result
        of a graph is valid until its part runs again. A draw with a kind returns eight bytes a padded row, which
        the runner copies out before a next step writes to them if they are at most SMALL_COPY_BYTES.
        """

    def captures(self, shape: StepShape, part: Part) -> bool:
        """Whether `run` has or captures a graph of that part of steps of the shape."""
        del shape, part
        return False

    def reserve(self, run_dummy: Callable[[StepShape], None]) -> int:
        """Returns the bytes of device memory that all graphs will take; called once, before the KV cache is sized.

        `run_dummy` runs a shape on a cache of two blocks; graphs that are made of it must be dropped again.
        """
        del run_dummy
        return 0

    def capture(self, run_dummy: Callable[[StepShape], None]) -> bool:
        """Captures one more shape, which `run_dummy` runs; returns whether more must be captured before any request.

        Called at the start until it returns False, and then between steps whose plan asks for it (`capture`) while
        `wanted` says so. One call takes at most about 50 ms where a step follows it; longer work waits for calls that
        no step separates. Never called where an attention backend, the model or a connector needs Python in each step:
        the worker then takes `EagerGraphs`.
        """
        del run_dummy
        return False

    def wanted(self) -> bool:
        """Whether `capture` has shapes left to capture, or shapes that steps had and no graph; ends in the end.

        Depends on the plans alone, so that all workers of an engine agree.
        """
        return False

    def drop(self) -> None:
        """Forgets all graphs, because the memory that they read has moved. They may be made again."""


class EagerGraphs(Graphs):
    """Captures nothing: every part is launched in every step."""

    def run(self, shape: StepShape, part: Part, work: Callable[[], Result], kind: str = "") -> Result:
        del shape, part, kind
        return work()


class TrialRun(Protocol):
    """Runs steps of every kind."""

    def __call__(self, *, brief: bool = False) -> None:
        """The first time also in every size for which launch code may choose another kernel, unless `brief`."""


class Kernels:
    """Compiles what steps launch before the first request. This class is its own null object: it compiles nothing."""

    def compile_ahead(self, rehearse: Callable[[Platform], None]) -> None:
        """Called once, before any device memory is asked for; may begin to compile in other processes.

        `rehearse(platform)` builds the model and runs steps of every kind on the platform it is given: a stand-in that
        launches nothing, in another process.
        """
        del rehearse

    def prepare(self, run: TrialRun) -> None:
        """Called once, before memory is profiled. `run` runs steps of every kind on a tiny cache, as often as called.

        A platform that needs no preparation does not call it.
        """
        del run


class Compiler:
    """Compiles the model as a whole. This class is its own null object: it leaves the model as it was built."""

    def prepare(self, model: Model, shapes: Shapes) -> Model:
        """Called once, when the weights are in place, before any step; returns the model to call.

        The result has the attributes, parameters and methods of `model`; every step has a shape that `shapes` chooses.
        """
        del shapes
        return model


@dataclass(frozen=True)
class Steps:
    """How a platform runs steps. A platform sets the parts that it has, and leaves the null objects elsewhere."""

    shapes: Shapes = field(default_factory=AnyShape)
    graphs: Graphs = field(default_factory=EagerGraphs)
    kernels: Kernels = field(default_factory=Kernels)
    compiler: Compiler = field(default_factory=Compiler)
