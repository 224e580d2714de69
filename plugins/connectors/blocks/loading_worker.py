"""The worker side of connectors that load prompt blocks beside the steps.

A thread fetches blocks into a few host buffers, and each step moves those that have arrived into the KV memory. A load
that fails reports the blocks that did not arrive, and this engine computes them. Does not know where blocks are stored.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from queue import Empty, Full, Queue
from typing import Any

import numpy as np

from frame.interfaces import CacheView, ConnectorWorkerSetup, TransferReport

from .messages import Move
from .worker import BlockWorker

logger = logging.getLogger("frame.connectors.loading")

#: Fetched parts of one load that may wait for a step.
_PARTS = 4
_POLL_SECONDS = 0.1

#: Fills rows of memory uint8 [n, block_bytes] with the blocks of n moves, and returns those that it could fill.
Fetch = Callable[[Sequence[Move], np.ndarray], list[int]]


@dataclass
class Load:
    """One request's load: parts (moves, their bytes, the rows that arrived), at last None."""

    owner: str
    parts: Queue[tuple[Sequence[Move], np.ndarray, list[int]] | None] = field(default_factory=lambda: Queue(_PARTS))
    stopped: threading.Event = field(default_factory=threading.Event)

    def give(self, part: tuple[Sequence[Move], np.ndarray, list[int]] | None) -> None:
        """Waits for room in the queue; returns without adding once the load was stopped."""
        while not self.stopped.is_set():
            try:
                self.parts.put(part, timeout=_POLL_SECONDS)
            except Full:
                continue
            return


class LoadingWorker(BlockWorker):
    """See the module. `num_threads` loads go on at once."""

    def __init__(self, setup: ConnectorWorkerSetup, options: Any, num_threads: int) -> None:
        super().__init__(setup, options)
        self._loads: list[Load] = []
        self._ended: list[str] = []
        self._gone: set[str] = set()  # requests that ended while they were loaded
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix=f"{self.title}-load")

    def register(self, caches: Mapping[str, CacheView]) -> None:
        if not caches:
            self.stop_loads()
            self._ended += [load.owner for load in self._loads]
            self._loads = []
            self._gone.clear()
        super().register(caches)

    def begin_load(
        self,
        owner: str,
        parts: Iterable[Sequence[Move]],
        fetch: Fetch,
        skip: Callable[[Sequence[Move]], None] = lambda moves: None,
    ) -> None:
        """Has a thread fetch the blocks of a request, part by part, and `skip` what is not fetched any more."""
        load, parts = Load(owner), list(parts)
        try:
            self._threads.submit(self._receive, load, parts, fetch, skip)
        except RuntimeError as error:  # no thread can be started; one that runs may find it in the queue
            logger.warning("blocks of request %s are not fetched: %s", owner, error)
            load.stopped.set()
            for part in parts:
                self.put(part, np.empty((0, 0), np.uint8), [])
            self._ended.append(owner)
        else:
            self._loads.append(load)

    def take_arrived(self) -> None:
        """Moves what has arrived into the KV memory."""
        for load in list(self._loads):
            self._take(load)

    def pending_loads(self) -> list[str]:
        return [*self._ended, *(load.owner for load in self._loads)]

    def loaded(self) -> list[str]:
        ended, self._ended = self._ended, []
        return ended

    def end_step(self, finished: Sequence[str]) -> TransferReport:
        self._gone.update(load.owner for load in self._loads if load.owner in finished)
        return super().end_step(finished)

    def stop_loads(self) -> None:
        """Has loads fetch nothing more."""
        for load in self._loads:
            load.stopped.set()

    def end_loads(self) -> None:
        """Waits for the threads, whose loads were stopped."""
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _receive(
        self, load: Load, parts: Iterable[Sequence[Move]], fetch: Fetch, skip: Callable[[Sequence[Move]], None]
    ) -> None:
        """Runs in a thread; fetches no further part once a block is missing."""
        whole = True
        for part in parts:
            data, rows = np.empty((0, 0), np.uint8), list[int]()
            try:
                if whole and load.owner not in self._gone and not load.stopped.is_set():
                    data = self.rows_for(part)
                    rows = fetch(part, data)
                else:
                    skip(part)
            except Exception:  # else the request would wait for ever
                logger.exception("blocks of request %s could not be fetched", load.owner)
            whole = whole and len(rows) == len(part)
            load.give((part, data, rows))
        load.give(None)

    def _take(self, load: Load) -> None:
        try:
            while (part := load.parts.get_nowait()) is not None:
                self.put(*part)
        except Empty:
            return
        self._loads.remove(load)
        self._gone.discard(load.owner)
        self._ended.append(load.owner)
