"""Runs functions in forked processes, with limits on their number and on the time of each and of all.

A child hands its results over on disk. Knows no compiler.
"""

from __future__ import annotations

import ctypes
import gc
import logging
import os
import signal
import sys
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from frame.links.processors import num_processors

logger = logging.getLogger("frame.platforms.forks")

_POLL_SECONDS = 0.005
_PR_SET_PDEATHSIG = 1


class Forks:
    """Children that are started in order, at most `limit` (None: one for each processor of this process) at a time.

    A child that runs for longer than `seconds` is killed, and whatever is left `all_seconds` after the first start.
    """

    def __init__(self, *, seconds: float, all_seconds: float, limit: int | None = None) -> None:
        self._limit = limit or max(2, num_processors())
        self._seconds, self._all_seconds = seconds, all_seconds
        self._waiting: deque[Callable[[], object]] = deque()
        self._running: dict[int, float] = {}
        self._end: float | None = None
        self.num_failed = 0

    def start(self, work: Callable[[], object]) -> None:
        """Starts `work` now, or, at the limit, in a later call of this or of `wait` once a child has ended."""
        if self._end is None:
            self._end = time.monotonic() + self._all_seconds
        self._waiting.append(work)
        self._advance()

    def wait(self) -> None:
        """Returns when all work is done and every child is reaped."""
        while self._running or self._waiting:
            self._advance()
            if self._running:
                time.sleep(_POLL_SECONDS)
        if self.num_failed:
            logger.warning("%d forked processes failed or took too long", self.num_failed)

    def stop(self) -> None:
        """Kills the children and drops the work that has not begun."""
        self.num_failed += len(self._waiting)
        self._waiting.clear()
        for child in self._running:
            os.kill(child, signal.SIGKILL)

    def _advance(self) -> None:
        now = time.monotonic()
        for child, deadline in list(self._running.items()):
            found, status = os.waitpid(child, os.WNOHANG)
            if found:
                del self._running[child]
                self.num_failed += status != 0
            elif now > deadline:
                os.kill(child, signal.SIGKILL)
        if self._end is not None and now > self._end:
            self.stop()
        while self._waiting and len(self._running) < self._limit:
            self._running[fork(self._waiting.popleft())] = now + self._seconds


class ForkedGroup:
    """A child that may have children of its own: all are killed after `seconds`, and when this is dropped."""

    def __init__(self, work: Callable[[], object], seconds: float) -> None:
        self._leader = [fork(partial(_lead, work))]
        with suppress(OSError):  # the child calls it too; the first call counts
            os.setpgid(self._leader[0], self._leader[0])
        self._end = time.monotonic() + seconds
        self._succeeded = False
        weakref.finalize(self, _stop, self._leader)

    def has_ended(self) -> bool:
        """Whether the child has ended; does not wait."""
        if self._leader:
            found, status = os.waitpid(self._leader[0], os.WNOHANG)
            if found:
                self._leader.clear()
                self._succeeded = status == 0
        return not self._leader

    def wait(self) -> bool:
        """Waits for the child to end and returns whether it succeeded."""
        while not self.has_ended():
            if time.monotonic() > self._end:
                self.stop()
            else:
                time.sleep(_POLL_SECONDS)
        return self._succeeded

    def stop(self) -> None:
        """Kills the child and its children."""
        _stop(self._leader)


def _lead(work: Callable[[], object]) -> None:
    os.setpgid(0, 0)
    work()


def _stop(leader: list[int]) -> None:
    if leader:
        os.killpg(leader[0], signal.SIGKILL)
        os.waitpid(leader.pop(), 0)


def fork(work: Callable[[], object]) -> int:
    """The id of a child that calls `work` and ends, with status 0 unless that raised."""
    with warnings.catch_warnings():
        # Newer Pythons warn of locks that other threads may hold: a child that waits for one is killed in the end.
        warnings.simplefilter("ignore", DeprecationWarning)
        parent, child = os.getpid(), os.fork()
    if child:
        return child
    status = 1
    try:
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # the parent died before the call took effect
                return child
        gc.disable()  # pages that the collector does not write stay shared with the parent
        work()
        status = 0
    finally:
        os._exit(status)
