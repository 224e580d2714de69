"""Threads whose work comes from several owners: each owner's pieces wait in its own line, and the lines take turns.

So much work of one owner delays another owner's by one piece a thread. Knows no grammar.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")


class FairThreads:
    """`num_threads` threads called `name`. May be called by any thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._lines: dict[str, dict[Future[Any], Callable[[], object]]] = {}  # by owner, the next owner first

    def is_full(self, owner: str, most: int) -> bool:
        """Whether one more piece of work of `owner` is one too many, where `most` may wait for a thread.

        Where so many wait already, an owner still has room for an equal part of them: `most` divided by the owners that
        wait. So one owner cannot fill the lines for others, and the sum stays below most * (1 + ln(most)).
        """
        with self._lock:
            total = sum(map(len, self._lines.values()))
            return total >= most and len(self._lines.get(owner, ())) >= most // len({*self._lines, owner})

    def waits(self, owner: str, future: Future[Any]) -> bool:
        """Whether the work of `future` is in the line of `owner`."""
        with self._lock:
            return future in self._lines.get(owner, ())

    def submit(self, owner: str, work: Callable[[], T], future: Future[T] | None = None) -> Future[T]:
        """Calls `work` on a thread; returns the future of its result.

        With `future`, which another owner got for the same work: it is done when the first of the two has its turn.
        """
        future = Future() if future is None else future
        with self._lock:
            line = self._lines.setdefault(owner, {})
            if future in line:
                return future
            line[future] = work
        self._pool.submit(self._work)
        return future

    def close(self) -> None:
        """Cancels what no thread has begun, and returns when the threads have ended."""
        self.cancel()
        self._pool.shutdown(wait=True)

    def cancel(self) -> None:
        """Cancels what no thread has begun; nothing may be submitted any more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            waiting = [future for line in self._lines.values() for future in line]
            self._lines.clear()
        for future in waiting:
            future.cancel()

    def _work(self) -> None:
        """Does the first piece of the owner whose turn it is, unless another owner's turn has done it."""
        with self._lock:
            if not self._lines:
                return  # cancelled
            owner = next(iter(self._lines))
            line = self._lines.pop(owner)
            future = next(iter(line))
            work = line.pop(future)
            if line:
                self._lines[owner] = line
            if future.running() or future.done() or not future.set_running_or_notify_cancel():
                return
        try:
            result = work()
        except BaseException as error:
            future.set_exception(error)
        else:
            future.set_result(result)
