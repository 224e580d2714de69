"""Moves blocks between host memory and what lies behind it, on threads of its own. Knows no device and no request."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from ..blocks.files import BlockFiles
from ..blocks.host_slab import HostSlab
from .disk import file_key, files_of
from .foreign_files import ForeignFiles
from .messages import HERE, OTHERS, Fetch, Kind, OffloadStep
from .options import OffloadOptions

logger = logging.getLogger("frame.connectors.offload")


@dataclass
class Moved:
    """What became of a block: whether it is there, and what it adds to counters."""

    good: bool
    counts: dict[str, float]


@dataclass(frozen=True)
class Store:
    """Blocks of tokens, or states: they have `parts` rows of `slab` each; a stage of a pipeline may have no rows.

    `others` has the files of engines of other parallel sizes, where there is a disk.
    """

    parts: int
    slab: Callable[[], HostSlab | None]
    others: Callable[[], ForeignFiles | None]


@dataclass
class Batch:
    """What a message asked for; `moves` [n] are under way."""

    kind: Kind
    number: int
    moves: list[Future[Moved]]


class TierMover:
    """Of `tokens` and `states`; `space` is the name of what this worker has on the disk."""

    def __init__(self, options: OffloadOptions, tokens: Store, states: Store) -> None:
        self._files: BlockFiles | None = None if options.disk is None else files_of(options)
        self._tokens = tokens
        self._states = states
        self._readers = ThreadPoolExecutor(options.disk_threads, thread_name_prefix="offload-fetch")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="offload-leave")
        self._batches: list[Batch] = []
        self._coming: dict[tuple[Store, int], Future[Moved]] = {}  # by the first row

    def mark(self) -> str:
        """The name of a new file, by which the scheduler side knows that it sees the same folder."""
        return "" if self._files is None else self._files.leave_mark()

    def begin(self, step: OffloadStep, space: str) -> None:
        """Starts what a message asks for; returns at once."""
        self._bring("fetch", step.number, self._tokens, space, step.fetches)
        self._bring("fetch state", step.number, self._states, space, step.state_fetches)
        self._write("leave", step.number, self._tokens, space, step.leaves)
        self._write("leave state", step.number, self._states, space, step.state_leaves)

    def coming(self, row: int) -> Future[Moved] | None:
        """What brings this row of tokens, if something does."""
        return self._coming.get((self._tokens, row // self._tokens.parts * self._tokens.parts))

    def coming_state(self, row: int) -> Future[Moved] | None:
        """What brings this row of states, if something does."""
        return self._coming.get((self._states, row))

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

    def _bring(self, kind: Kind, number: int, store: Store, space: str, fetches: Sequence[Fetch]) -> None:
        if fetches:
            moves = [self._submit(self._readers, self._fetch, store, space, one) for one in fetches]
            self._batches.append(Batch(kind, number, moves))
            self._coming.update(((store, one.row), move) for one, move in zip(fetches, moves, strict=True))

    def _write(self, kind: Kind, number: int, store: Store, space: str, leaves: Sequence[Fetch]) -> None:
        if leaves:
            moves = [self._submit(self._writer, self._leave, store, space, one) for one in leaves]
            self._batches.append(Batch(kind, number, moves))

    def _submit(
        self, threads: ThreadPoolExecutor, work: Callable[..., Moved], store: Store, space: str, fetch: Fetch
    ) -> Future[Moved]:
        move = Future[Moved]()
        try:
            threads.submit(self._run, move, work, store, space, fetch)
        except RuntimeError as error:  # no thread can be started, but one that runs may find this in the queue
            if move.cancel():
                logger.warning("a block is not moved: %s", error)
                move = Future[Moved]()
                move.set_result(Moved(good=False, counts={}))
        return move

    def _run(self, move: Future[Moved], work: Callable[..., Moved], store: Store, space: str, fetch: Fetch) -> None:
        if move.set_running_or_notify_cancel():
            move.set_result(self._tried(work, store, space, fetch))

    def _tried(self, work: Callable[..., Moved], store: Store, space: str, fetch: Fetch) -> Moved:
        try:
            slab = store.slab()
            return Moved(good=True, counts={}) if slab is None else work(slab, store, space, fetch)
        except Exception:
            logger.exception("a block could not be moved")
            return Moved(good=False, counts={})

    def _fetch(self, slab: HostSlab, store: Store, space: str, fetch: Fetch) -> Moved:
        """To host memory; what it is known by there is written, too."""
        begun, count, others = time.monotonic(), store.parts, store.others()
        parts = range(count)
        match fetch.shelf:
            case "":
                name = "disk"
                good = self._files is not None and all(
                    self._files.read(space, file_key(fetch.key, part, count), slab.row(fetch.row + part))
                    for part in parts
                )
            case shelf if shelf.startswith(OTHERS):
                name, keys = "disk", [file_key(fetch.key, part, count) for part in parts]
                rows = [torch.from_numpy(slab.row(fetch.row + part)) for part in parts]
                good = others is not None and others.take(shelf.removeprefix(OTHERS), keys, rows)
            case shelf if shelf == HERE:
                name, good = "checked", _is_sound(slab, count, fetch)
            case shelf:
                name = "shared"
                good = slab.take(shelf, fetch.their_slot, fetch.theirs, fetch.key, fetch.row, count)
        if not good:
            return Moved(good=False, counts={f"{name}_failed_blocks": 1})
        for part in parts if name != "checked" else ():
            slab.sign(fetch.row + part, fetch.key, fetch.generation, part)
        size = count * slab.row_bytes
        return Moved(good=True, counts={f"{name}_read_bytes": size, f"{name}_read_seconds": time.monotonic() - begun})

    def _leave(self, slab: HostSlab, store: Store, space: str, fetch: Fetch) -> Moved:
        begun, written, count = time.monotonic(), 0, store.parts
        if not _is_sound(slab, count, fetch):
            return Moved(good=False, counts={"checked_failed_blocks": 1})
        for part in range(count):
            key = file_key(fetch.key, part, count)
            if self._files is None or self._files.touch(space, key):
                continue
            data = slab.row(fetch.row + part)
            if not self._files.write(space, key, data):
                return Moved(good=False, counts={"disk_lost_blocks": 1})
            written += data.nbytes
        seconds = time.monotonic() - begun
        return Moved(good=True, counts={"disk_written_bytes": written, "disk_written_seconds": seconds})


def _is_sound(slab: HostSlab, count: int, fetch: Fetch) -> bool:
    return all(slab.sound(fetch.row + part, fetch.key, fetch.generation, part) for part in range(count))
