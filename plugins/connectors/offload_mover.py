"""Moves blocks between host memory and what lies behind it, on threads of its own. Knows no device and no request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from .block_files import BlockFiles
from .host_slab import HostSlab
from .offload_disk import file_key, files_of
from .offload_messages import HERE, Fetch, Kind, OffloadOptions

logger = logging.getLogger("frame.connectors.offload")


@dataclass
class Moved:
    """What became of a block: whether it is there, and what it adds to counters."""

    good: bool
    counts: dict[str, float]


@dataclass
class Batch:
    """What a message asked for; `moves` [n] are under way."""

    kind: Kind
    number: int
    moves: list[Future[Moved]]


class TierMover:
    """Blocks have `parts` rows of `slab` each; `space` is the name of this worker's blocks on the disk."""

    def __init__(self, options: OffloadOptions, parts: int, slab: Callable[[], HostSlab]) -> None:
        self._files: BlockFiles | None = None if options.disk is None else files_of(options)
        self._parts = parts
        self._slab = slab
        self._readers = ThreadPoolExecutor(options.disk_threads, thread_name_prefix="offload-fetch")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offload-leave")
        self._batches: list[Batch] = []
        self._coming: dict[int, Future[Moved]] = {}  # by the first row

    def mark(self) -> str:
        """The name of a new file, by which the scheduler side knows that it sees the same folder."""
        return "" if self._files is None else self._files.leave_mark()

    def begin(self, number: int, space: str, fetches: Sequence[Fetch], leaves: Sequence[Fetch]) -> None:
        """Starts both; returns at once."""
        if fetches:
            moves = [self._readers.submit(self._tried, self._fetch, space, one) for one in fetches]
            self._batches.append(Batch("fetch", number, moves))
            self._coming.update((one.row, move) for one, move in zip(fetches, moves, strict=True))
        if leaves:
            moves = [self._writer.submit(self._tried, self._leave, space, one) for one in leaves]
            self._batches.append(Batch("leave", number, moves))

    def coming(self, row: int) -> Future[Moved] | None:
        """What brings this row, if something does."""
        return self._coming.get(row // self._parts * self._parts)

    def ended(self, count: Callable[[str, float], None]) -> list[tuple[Kind, int, list[int]]]:
        """What has ended since the last call, of which message, and the places that failed. `count` is a counter's."""
        ended: list[tuple[Kind, int, list[int]]] = []
        for batch in [one for one in self._batches if all(move.done() for move in one.moves)]:
            self._batches.remove(batch)
            results = [move.result() for move in batch.moves]
            for result in results:
                for name, value in result.counts.items():
                    count(name, value)
            ended.append((batch.kind, batch.number, [place for place, one in enumerate(results) if not one.good]))
            gone = set(map(id, batch.moves))
            self._coming = {row: move for row, move in self._coming.items() if id(move) not in gone}
        return ended

    def close(self) -> None:
        """Gives up what has not begun, and waits for the rest."""
        for threads in (self._readers, self._writer):
            threads.shutdown(wait=True, cancel_futures=True)

    def _tried(self, work: Callable[[str, Fetch], Moved], space: str, fetch: Fetch) -> Moved:
        try:
            return work(space, fetch)
        except Exception:
            logger.exception("a block could not be moved")
            return Moved(good=False, counts={})

    def _fetch(self, space: str, fetch: Fetch) -> Moved:
        """To host memory; what it is known by there is written, too."""
        begun, slab, parts = time.monotonic(), self._slab(), range(self._parts)
        match fetch.shelf:
            case "":
                name = "disk"
                good = self._files is not None and all(
                    self._files.read(space, file_key(fetch.key, part, self._parts), slab.row(fetch.row + part))
                    for part in parts
                )
            case shelf if shelf == HERE:
                name, good = "checked", self._sound(fetch)
            case shelf:
                name = "shared"
                good = slab.take(shelf, fetch.their_slot, fetch.theirs, fetch.key, fetch.row, self._parts)
        if not good:
            return Moved(good=False, counts={f"{name}_failed_blocks": 1})
        for part in parts if name != "checked" else ():
            slab.sign(fetch.row + part, fetch.key, fetch.generation, part)
        size = self._parts * slab.row_bytes
        return Moved(good=True, counts={f"{name}_read_bytes": size, f"{name}_read_seconds": time.monotonic() - begun})

    def _sound(self, fetch: Fetch) -> bool:
        return all(
            self._slab().sound(fetch.row + part, fetch.key, fetch.generation, part) for part in range(self._parts)
        )

    def _leave(self, space: str, fetch: Fetch) -> Moved:
        begun, written = time.monotonic(), 0
        if not self._sound(fetch):
            return Moved(good=False, counts={"checked_failed_blocks": 1})
        for part in range(self._parts):
            key = file_key(fetch.key, part, self._parts)
            if self._files is None or self._files.touch(space, key):
                continue
            data = self._slab().row(fetch.row + part)
            if not self._files.write(space, key, data):
                return Moved(good=False, counts={"disk_lost_blocks": 1})
            written += data.nbytes
        seconds = time.monotonic() - begun
        return Moved(good=True, counts={"disk_written_bytes": written, "disk_written_seconds": seconds})
