"""A scheduling policy: the order in which waiting requests are admitted and running ones give way."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from .setup import EngineSetup


class Schedulable(Protocol):
    """What a policy may look at. Times are `time.monotonic()` seconds; `num_tokens` counts prompt and output.

    `owner` is whose it is, "" where nobody tells owners apart, and `turn` its place where owners take turns by tokens:
    what its owner has asked for before it, but not less than where those that are served have come to.
    """

    request_id: str
    priority: int
    arrival: float
    turn: float

    @property
    def owner(self) -> str: ...

    @property
    def owner_running(self) -> int:
        """Requests of its owner that run."""

    @property
    def num_computed(self) -> int: ...

    @property
    def num_tokens(self) -> int: ...


class SchedulerPolicy(ABC):
    """Built as `Class(setup, options)`. Must be a pure function of what it is given."""

    def __init__(self, setup: EngineSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options

    @abstractmethod
    def key(self, request: Schedulable) -> tuple[Any, ...]:
        """Sort key: the waiting request with the smallest key is admitted first, the running one with the largest
        gives way first when blocks run out.
        """

    def gives_way(self, running: Schedulable, waiting: Schedulable) -> bool:
        """Whether a running request leaves its place to the first waiting one, for which there is no room.

        It is computed again later, after that one. Asked every few steps of every running request.
        """
        return False
