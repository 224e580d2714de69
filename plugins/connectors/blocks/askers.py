"""Threads that ask other engines, shared so that engines that say nothing leave some to the others. Knows no question.

What a host is asked beyond its share waits, and takes no thread meanwhile.
"""

from __future__ import annotations

import threading
from collections import Counter, OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

T = TypeVar("T")

#: Threads, and those of them for places that have not answered: clients say which places are asked.
THREADS, STRANGERS = 16, 8
#: Threads for one host, and as long as no more are busy there also for its places that have not answered.
PER_HOST, STRANGERS_PER_HOST = 4, 2
_MOST_KNOWN = 1024


@dataclass
class _Task:
    place: tuple[str, int]
    work: Callable[[], Any]
    future: Future[Any]
    strange: bool = False


class Askers:
    """See the module. A place is a host and a port."""

    def __init__(self, name: str) -> None:
        self._threads = ThreadPoolExecutor(THREADS, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, int], None] = OrderedDict()
        self._busy: Counter[str] = Counter()  # threads by host
        self._num_strange = 0  # threads
        self._waiting: list[_Task] = []
        self._closed = False

    def submit(self, place: tuple[str, int], work: Callable[[], T]) -> Future[T]:
        """Has a thread do what asks `place`; raises `RuntimeError` where none can be started."""
        task = _Task(place, work, Future())
        self._threads.submit(self._run, task)
        return task.future

    def heard(self, place: tuple[str, int], answers: bool) -> None:
        """Called by what asks a place: whether that answered."""
        with self._lock:
            self._known.pop(place, None)
            if answers:
                self._known[place] = None
                if len(self._known) > _MOST_KNOWN:
                    self._known.popitem(last=False)

    def close(self) -> None:
        """Waits for what was begun; nothing else is asked any more."""
        with self._lock:
            self._closed, waiting = True, self._waiting
            self._waiting = []
        for task in waiting:
            task.future.cancel()
        self._threads.shutdown(wait=True)  # what was not begun ends in `_run`, as else its future never would

    def _run(self, task: _Task) -> None:
        with self._lock:
            if self._closed:
                task.future.cancel()
                return
            if not self._begin(task):
                self._waiting.append(task)
                return
        following: _Task | None = task
        while following is not None:
            if following.future.set_running_or_notify_cancel():
                try:
                    following.future.set_result(following.work())
                except BaseException as error:  # raised where the result is asked for
                    following.future.set_exception(error)
            following = self._next(following)

    def _next(self, ended: _Task) -> _Task | None:
        """What this thread does after a task: the first of those that wait and now have room."""
        with self._lock:
            self._busy[ended.place[0]] -= 1
            self._busy += Counter()  # drops hosts without threads
            self._num_strange -= ended.strange
            for place, task in enumerate(self._waiting):
                if self._begin(task):
                    del self._waiting[place]
                    return task
        return None

    def _begin(self, task: _Task) -> bool:
        """Takes a share of threads for a task, if there is one."""
        host, task.strange = task.place[0], task.place not in self._known
        if self._busy[host] >= (STRANGERS_PER_HOST if task.strange else PER_HOST):
            return False
        if task.strange and self._num_strange >= STRANGERS:
            return False
        self._busy[host] += 1
        self._num_strange += task.strange
        return True
