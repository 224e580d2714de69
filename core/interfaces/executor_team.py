"""An executor of one or several workers, each of which a subclass makes: what they do together, and their answers.

Calls that take long reach all workers at the same time, since they wait for one another there.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from copy import copy
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast

from .executor import DeadWorkerError, Executor, Progress, StepHandle, WorkerFacts, WorkerProtocol, WorkerReady
from .kv import KVLayout
from .mesh import Placement
from .step import StepPlan, StepResult

if TYPE_CHECKING:
    from .setup import ExecutorSetup

T = TypeVar("T")

#: What a worker made of a step: its results, what it raised, or None where it is not done.
StepOutcome: TypeAlias = "list[StepResult] | Exception | None"


class TeamExecutor(Executor):
    """Makes the workers when it is built, in order of rank."""

    def __init__(self, setup: ExecutorSetup, options: Any = None) -> None:
        super().__init__(setup, options)
        self.team: list[WorkerProtocol] = []
        self._broken: DeadWorkerError | None = None
        self._answering: list[int] = []  # the ranks whose results count, first the one that has the tokens
        try:
            for placement in setup.placements:
                self.team.append(self.make(placement))
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def make(self, placement: Placement) -> WorkerProtocol:
        """A worker, by `self.workers` or otherwise."""

    def outcomes(self, handles: Sequence[StepHandle], answering: Sequence[int]) -> list[StepOutcome]:
        """Waits for a step; by rank what the worker answered, or raised, or None where it is not done.

        May return as soon as the workers `answering` are done; where one has failed it waits for all, within limits.
        Raises `DeadWorkerError` when one is gone.
        """
        del answering
        return [step_outcome(handle) for handle in handles]

    def load(self) -> list[WorkerFacts]:
        facts = self._together(lambda worker: worker.load())
        output = self.setup.mesh.output_rank
        answering = [rank for rank, fact in enumerate(facts) if fact.answers]
        self._answering = sorted(answering, key=lambda rank: (rank != output, rank))
        return facts

    def allocate(self, layout: KVLayout) -> list[WorkerReady]:
        return self._together(lambda worker: worker.allocate(layout))

    def execute(self, plan: StepPlan) -> None:
        for worker in self.team:
            worker.execute(plan)

    def sample(self, masks: bytes = b"") -> StepHandle:
        handles = self.launch_draws(masks)
        return handles[0] if len(handles) == 1 else TeamStep(self, handles, self._answering)

    def launch_draws(self, masks: bytes) -> list[StepHandle]:
        """Has every worker draw tokens for the step executed last; by rank what each will have made of it."""
        return [worker.sample(masks) for worker in self.team]

    def call(self, method: str, arguments: dict[str, Any] | None = None, timeout: float | None = None) -> list[Any]:
        return self._together(lambda worker: worker.call(method, arguments, timeout), ends=False)

    def broken(self, message: str, *, killed: bool = False) -> DeadWorkerError:
        """The error of a team that cannot go on, which `check` raises from now on."""
        self._broken = DeadWorkerError(message, killed=killed)
        return self._broken

    @property
    def is_broken(self) -> bool:
        """Whether a worker is gone, hangs, or does not do what the others do."""
        return self._broken is not None

    def check(self) -> None:
        if self._broken is not None:
            raise self._broken
        for rank, worker in enumerate(self.team):
            try:
                worker.check()
            except DeadWorkerError as error:
                raise self.named(rank, error) from None

    def named(self, rank: int, error: Exception) -> Exception:
        """`error` of the worker `rank`, which its message names where there are several."""
        return named_error(rank, len(self.setup.placements), error)

    def progress(self) -> Progress | None:
        found = [worker.progress() for worker in self.team]
        known = [one for one in found if one is not None]
        if len(known) < len(found):
            return None
        return min(known, key=lambda one: (one.step, one.exchanges), default=None)

    def close(self) -> None:
        for worker in self.team:
            worker.close()

    def _together(self, work: Callable[[WorkerProtocol], T], *, ends: bool = True) -> list[T]:
        """The answers of all workers by rank; raises the first error. With `ends` it closes all workers before."""
        if len(self.team) == 1:
            return [work(self.team[0])]
        with ThreadPoolExecutor(len(self.team), "frame-executor") as threads:
            ranks = {threads.submit(work, worker): rank for rank, worker in enumerate(self.team)}
            for future in as_completed(ranks):
                if (error := future.exception()) is not None:
                    named = self.named(ranks[future], error) if isinstance(error, Exception) else error
                    if ends:
                        self.close()  # those that wait for the one that failed would do so for minutes
                    raise named
        return [future.result() for future in ranks]


class TeamStep:
    """A step that several workers run: done when all are, answered by those whose results count."""

    def __init__(self, executor: TeamExecutor, handles: Sequence[StepHandle], answering: Sequence[int]) -> None:
        self._executor, self._handles, self._answering = executor, handles, answering
        self._outcomes: list[StepOutcome] | None = None

    def ready(self) -> bool:
        return self._outcomes is not None or all(handle.ready() for handle in self._handles)

    def results(self) -> list[StepResult]:
        if self._outcomes is None:
            self._outcomes = self._executor.outcomes(self._handles, self._answering)
        late = [rank for rank, outcome in enumerate(self._outcomes) if outcome is None]
        for rank, outcome in enumerate(self._outcomes):
            if isinstance(outcome, Exception):
                error = self._executor.named(rank, outcome)
                if late:
                    raise self._executor.broken(f"worker {late[0]} did not end a step that failed: {error}")
                raise error from None
        return [result for rank in self._answering for result in cast("list[StepResult]", self._outcomes[rank])]


def named_error(rank: int, num_workers: int, error: Exception) -> Exception:
    """`error` of the worker `rank`, which its message names where there are several."""
    if num_workers == 1 or not isinstance(error, RuntimeError | ValueError | TimeoutError):
        return error
    named = copy(error)
    named.args = (f"worker {rank} of {num_workers}: {error}", *error.args[1:])
    return named


def step_outcome(handle: StepHandle) -> StepOutcome:
    """Waits for one worker's part of a step."""
    try:
        return handle.results()
    except Exception as error:
        return error
