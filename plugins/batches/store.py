"""Batches: input files that are answered line by line; a restarted server continues them.

Of several API processes that share a folder, the one that holds its lock runs the batches. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import re
import time
import uuid
from collections import Counter
from collections.abc import Callable, Container, Iterator
from contextlib import aclosing, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import msgspec

from frame.interfaces import RequestError, Serving
from frame.quoting import quoted

from .files import FileStore, open_private, remove_stale, write_json
from .lines import BatchLines

logger = logging.getLogger("frame.server")

Object = dict[str, Any]

_BATCH = re.compile(r"batch_[0-9a-f]{32}")
_OPEN = ("validating", "in_progress", "finalizing", "cancelling")
_WINDOW_SECONDS = 24 * 3600
#: Seconds between two checks for batches of other processes and for a free lock.
_POLL_SECONDS = 2.0
_REPORT_SECONDS = 1.0
#: Seconds until a batch that could not be written is taken up again.
_RETRY_SECONDS = 60.0
#: How long after the end of its time a batch that still fails is tried again.
_GRACE_SECONDS = 3600
#: Lines of all batches that run at once; each batch runs at least one.
_WIDTH = 64
#: Records of ended batches that are kept; then the oldest of the owner with the most is deleted, not its result files.
_MAX_ENDED = 1000


class BatchRecord(msgspec.Struct, kw_only=True):
    """What is known of a batch. `owner` and `num_lines` are not shown."""

    id: str
    owner: str
    endpoint: str
    input_file_id: str
    completion_window: str
    created_at: int
    status: str = "validating"
    model: str | None = None
    metadata: dict[str, str] | None = None
    num_lines: int = 0
    num_succeeded: int = 0
    num_failed: int = 0
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    expires_at: int | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    errors: Object | None = None

    def shown(self) -> Object:
        """The batch object that clients see."""
        hidden = ("owner", "num_lines", "num_succeeded", "num_failed")
        fields = {name: getattr(self, name) for name in self.__struct_fields__ if name not in hidden}
        counts = {"total": self.num_lines, "completed": self.num_succeeded, "failed": self.num_failed}
        return {"object": "batch", "request_counts": counts, **fields}

    def ends(self, status: str) -> None:
        """Sets a final status and its time."""
        self.status = status
        setattr(self, f"{status}_at", int(time.time()))


class _Row(msgspec.Struct):
    id: str


class BatchStore:
    """The batches in `folder`, and the task that runs them.

    Batches of one owner run one after the other, beside the batches of other owners.
    """

    def __init__(self, serving: Serving, files: FileStore, folder: Path, max_open: int, max_lines: int) -> None:
        self._serving = serving
        self._files = files
        self._folder = folder / "batches"
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        remove_stale(self._folder)
        self._max_open = max_open
        self._max_lines = max_lines
        self._runner: asyncio.Task[None] | None = None
        self._woken = asyncio.Event()

    def start(self) -> None:
        """Starts the task that runs open batches, unless it runs already."""
        if self._runner is None or self._runner.done():
            self._runner = asyncio.get_running_loop().create_task(self._run())

    def add(self, owner: str, endpoint: str, file_id: str, window: str, metadata: dict[str, str] | None) -> BatchRecord:
        """A new batch; raises `RequestError`."""
        purpose = self._files.get(file_id, owner).purpose
        if purpose != "batch":
            raise RequestError(400, f"input_file_id must be of purpose batch, got {purpose}", param="input_file_id")
        if sum(each.status in _OPEN for each in self.records(owner)) >= self._max_open:
            raise RequestError(429, f"{self._max_open} batches are open, the most for one key; wait until one ends")
        now = int(time.time())
        record = BatchRecord(
            id=f"batch_{time.time_ns():016x}{uuid.uuid4().hex[:16]}",  # in order of creation within a second, too
            owner=owner,
            endpoint=endpoint,
            input_file_id=file_id,
            completion_window=window,
            created_at=now,
            expires_at=now + _WINDOW_SECONDS,
            model=self._serving.models.names[0],
            metadata=metadata,
        )
        self._forget_oldest()
        self._write(record)
        self._woken.set()
        return record

    def _forget_oldest(self) -> None:
        ended = [record for record in self.records() if record.status not in _OPEN]
        while len(ended) >= _MAX_ENDED:
            (most, _), *_ = Counter(each.owner for each in ended).most_common(1)
            record = next(each for each in ended if each.owner == most)
            ended.remove(record)
            for suffix in ("json", "cancel", "output.jsonl", "error.jsonl"):
                (self._folder / f"{record.id}.{suffix}").unlink(missing_ok=True)

    def get(self, name: str, owner: str) -> BatchRecord:
        """A batch; raises `RequestError` 404 also when it belongs to somebody else."""
        record = self._read(self._folder / f"{name}.json") if _BATCH.fullmatch(name) else None
        if record is None or record.owner != owner:
            raise RequestError(404, f"no batch {quoted(name)}", code="batch_not_found")
        return record

    def cancel(self, record: BatchRecord) -> BatchRecord:
        """Asks for the end of a batch; lines that are running are finished first."""
        if record.status in _OPEN:
            self._mark(record.id).touch()
            record.status = "cancelling"
            record.cancelling_at = record.cancelling_at or int(time.time())
        return record

    def records(self, owner: str | None = None) -> Iterator[BatchRecord]:
        """All batches, or an owner's, oldest first."""
        found = [record for path in self._folder.glob("batch_*.json") if (record := self._read(path)) is not None]
        for record in sorted(found, key=lambda record: (record.created_at, record.id)):
            if owner is None or record.owner == owner:
                yield record

    async def _run(self) -> None:
        """Takes the folder's lock, then runs the open batches for as long as the process lives, one of each owner."""
        running: dict[str, asyncio.Task[None]] = {}
        with open_private(self._folder / "lock", "w") as lock:
            while True:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    await asyncio.sleep(_POLL_SECONDS)
            try:
                while True:
                    self._woken.clear()
                    due = await asyncio.to_thread(self._due, set(running))  # reads up to a thousand files
                    for record in due if self._serving.engine.error is None else ():
                        running[record.owner] = asyncio.create_task(self._run_one(record, running))
                    with suppress(TimeoutError):
                        async with asyncio.timeout(_POLL_SECONDS):
                            await self._woken.wait()
            finally:
                for task in running.values():
                    task.cancel()

    def _due(self, busy: Container[str] = ()) -> list[BatchRecord]:
        """The oldest open batch of each owner that is not `busy`."""
        due: dict[str, BatchRecord] = {}
        for record in self.records():
            if record.status in _OPEN and record.owner not in busy:
                due.setdefault(record.owner, record)
        return list(due.values())

    async def _run_one(self, record: BatchRecord, running: dict[str, asyncio.Task[None]]) -> None:
        """Runs one batch of `running`, whose batches share the lines that may run at once."""
        try:
            await self._answer(record, lambda: max(1, _WIDTH // len(running)))
        except Exception:  # such as a full disk; what was written stays, and the batch is taken up again from there
            logger.exception("batch %s was interrupted; it goes on in %g seconds", record.id, _RETRY_SECONDS)
            if time.time() > (record.expires_at or 0) + _GRACE_SECONDS:
                self._give_up(record)
            await asyncio.sleep(_RETRY_SECONDS)
        finally:
            running.pop(record.owner, None)
            self._woken.set()

    def _give_up(self, record: BatchRecord) -> None:
        """Ends a batch that still fails when its time is over, so that the owner's next ones run."""
        record.errors = _errors([{"code": "server_error", "message": "an internal error interrupted the batch"}])
        record.ends("failed")
        with suppress(OSError):
            self._write(record)

    async def _answer(self, record: BatchRecord, width: Callable[[], int] = lambda: _WIDTH) -> None:
        good, bad = (self._folder / f"{record.id}.{kind}.jsonl" for kind in ("output", "error"))
        if (
            record.output_file_id or record.error_file_id
        ):  # an earlier run of the server stopped while it ended the batch
            self._end(record, good, bad)
            return
        done_good, done_bad = await asyncio.to_thread(lambda: (_complete_rows(good), _complete_rows(bad)))
        record.num_succeeded, record.num_failed = len(done_good), len(done_bad)
        if not self._stopped(record):
            try:
                with self._files.open(record.input_file_id, record.owner) as lines:
                    if await self._begin(record, lines):
                        with open_private(good, "ab") as output, open_private(bad, "ab") as errors:
                            await self._run_lines(record, lines, done_good | done_bad, output, errors, width)
            except RequestError as error:
                record.errors = _errors([{"code": "invalid_batch", "message": str(error)}])
        # once this record is written, no line runs again even if the process ends
        record.status, record.finalizing_at = "finalizing", int(time.time())
        record.output_file_id = self._files.new_id() if _size(good) else None
        record.error_file_id = self._files.new_id() if _size(bad) else None
        self._write(record)
        self._end(record, good, bad)

    async def _begin(self, record: BatchRecord, lines: BinaryIO) -> bool:
        """Whether the lines may run: one wrong line fails the whole batch before any line runs, as with OpenAI."""
        if record.in_progress_at is None:  # else the lines were checked before the server restarted
            check = partial(BatchLines(self._serving.batches, url=record.endpoint).check, lines, self._max_lines)
            record.num_lines, problems = await asyncio.to_thread(check)
            if problems:
                record.errors = _errors(problems)
                return False
            lines.seek(0)
        record.status, record.in_progress_at = "in_progress", record.in_progress_at or int(time.time())
        self._write(record)
        return True

    def _stopped(self, record: BatchRecord) -> bool:
        """Whether the batch was cancelled or its time is over."""
        return self._mark(record.id).exists() or time.time() > (record.expires_at or 0)

    async def _run_lines(
        self,
        record: BatchRecord,
        lines: BinaryIO,
        done: set[str],
        output: BinaryIO,
        errors: BinaryIO,
        width: Callable[[], int],
    ) -> None:
        """Runs the lines that are not `done` and writes each result when its line ends."""
        reported = time.monotonic()
        batch = BatchLines(self._serving.batches, owner=record.owner, url=record.endpoint, width=width)
        async with aclosing(batch.run(lines, done, partial(self._stopped, record))) as results:
            async for result in results:
                target = output if result.succeeded else errors
                target.write(result.line)
                target.flush()
                record.num_succeeded += result.succeeded
                record.num_failed += not result.succeeded
                if time.monotonic() - reported > _REPORT_SECONDS:
                    reported = time.monotonic()
                    self._write(record)

    def _end(self, record: BatchRecord, good: Path, bad: Path) -> None:
        """Stores the results as files and ends the batch; repeating it after an interruption is safe."""
        for path, name, kind in ((good, record.output_file_id, "output"), (bad, record.error_file_id, "error")):
            if name is not None:
                self._files.add(path, record.owner, f"{record.id}_{kind}.jsonl", "batch_output", name=name)
            path.unlink(missing_ok=True)
        complete = 0 < record.num_lines == record.num_succeeded + record.num_failed
        stopped = "cancelled" if self._mark(record.id).exists() else "expired"
        record.ends("failed" if record.errors else "completed" if complete else stopped)
        self._write(record)
        self._mark(record.id).unlink(missing_ok=True)

    def _write(self, record: BatchRecord) -> None:
        write_json(self._folder / f"{record.id}.json", record)

    def _read(self, path: Path) -> BatchRecord | None:
        with suppress(OSError, msgspec.DecodeError):
            record = msgspec.json.decode(path.read_bytes(), type=BatchRecord)
            if record.status in _OPEN and self._mark(record.id).exists():
                record.status = "cancelling"
            return record
        return None

    def _mark(self, name: str) -> Path:
        return self._folder / f"{name}.cancel"


def _errors(problems: list[Object]) -> Object:
    return {"object": "list", "data": problems}


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _complete_rows(path: Path) -> set[str]:
    """The ids in a file of results; an incomplete last row is cut off."""
    if not path.exists():
        return set()
    data = path.read_bytes()
    whole = data[: data.rfind(b"\n") + 1]
    if len(whole) < len(data):
        with path.open("r+b") as file:
            file.truncate(len(whole))
    return {msgspec.json.decode(row, type=_Row).id for row in whole.splitlines()}
