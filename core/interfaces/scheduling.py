"""A scheduling policy: the order in which waiting requests are admitted and running ones give way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .setup import EngineSetup


class Schedulable(Protocol):
    """What a policy may read of a request. `arrival` is in Unix seconds; `num_tokens` counts prompt and output.

    `owner` names whose request it is, "" where owners are not told apart. `turn` orders requests so that owners share
    tokens equally: the tokens that its owner had asked for before it, but at least the `turn` that is being served.
    """

    request_id: str
    priority: int
    arrival: float
    turn: float

    @property
    def owner(self) -> str: ...

    @property
    def owner_running(self) -> int:
        """How many requests of its owner run."""

    @property
    def num_computed(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


class SchedulerPolicy(ABC):
    """Built as `Class(setup, options)`. Its answers must depend on their arguments alone."""

    def __init__(self, setup: EngineSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @abstractmethod
    def key(self, request: Schedulable) -> tuple[Any, ...]:
        """Returns the key by which requests are sorted, of waiting and of running ones.

        The waiting request with the smallest key is admitted first. When blocks run out, the running one with the
        largest key is preempted first, or the largest of those that give way to it.
        """

    def gives_way(self, running: Schedulable, waiting: Schedulable) -> bool:
        """Whether `running` is preempted in favour of `waiting`, for which there is no room, or which ran until now.

        The preempted request is computed again later, and `waiting` is admitted before all others. Called every few
        steps for every running request and, in the order of their keys, the first waiting request of each owner.
        """
        return False
