"""`frame run-batch`: a file of requests through the routes of an engine of its own, into a file of results.

Results are written as lines end and found again by their ids, so that a run that was killed goes on where it was; when
all are there, they are put into the order of the input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from tqdm import tqdm

from frame.settings import ConfigError, FrameConfig, open_routes

from .lines import LATER, BatchLines, LineResult, line_id, line_number


@dataclass
class BatchCounts:
    """Lines by how they ended. `unserved` are among the failed: they are tried again when the run is repeated."""

    total: int
    earlier: int = 0
    succeeded: int = 0
    failed: int = 0
    unserved: int = 0

    def see(self, result: LineResult) -> None:
        """Counts one result."""
        self.succeeded += result.succeeded
        self.failed += not result.succeeded
        self.unserved += result.unserved


class _Row(msgspec.Struct):
    """What a resumed run reads of a result."""

    id: str
    response: dict[str, Any] | None = None


def read_ids(source: Path) -> list[str]:
    """The ids of all lines, in order."""
    with source.open("rb") as lines:
        return [line_id(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def resume(target: Path, ids: Collection[str]) -> set[str]:
    """The ids of lines that need no second run.

    Leaves in the file what is complete and was served. Raises `ConfigError` when the file holds results of other lines.
    """
    if not target.exists():
        return set()
    known, done, kept = set(ids), set(), Path(f"{target}.resumed")
    with target.open("rb") as rows, kept.open("wb") as out:
        for row in rows:
            found = _read_row(row)
            torn = not row.endswith(b"\n")
            if not torn and (found is None or found.id not in known):
                kept.unlink()
                raise ConfigError(
                    f"{target} holds something else than results of this input: remove it, or name another"
                )
            if found is not None and (found.response or {}).get("status_code") not in LATER:
                done.add(found.id)
                out.write(row)
    os.replace(kept, target)
    return done


def _read_row(row: bytes) -> _Row | None:
    """A complete result; None for anything else, such as the beginning of one."""
    try:
        return msgspec.json.decode(row, type=_Row) if row.endswith(b"\n") else None
    except (msgspec.DecodeError, UnicodeDecodeError):
        return None


async def run_batch(
    config: FrameConfig,
    source: Path,
    target: Path,
    *,
    width: int,
    progress: bool = True,
    command: Sequence[str] | None = None,
) -> BatchCounts:
    """Answers every line of `source` that has no result in `target` yet; returns how they ended."""
    ids = await asyncio.to_thread(read_ids, source)
    done = await asyncio.to_thread(resume, target, ids)
    counts = BatchCounts(len(ids), earlier=len(done))
    if len(done) == len(ids):
        await asyncio.to_thread(put_in_order, target)
        return counts
    with (
        tqdm(total=len(ids), initial=len(done), unit="line", disable=not progress, dynamic_ncols=True) as bar,
        source.open("rb") as lines,
        target.open("ab") as out,
    ):
        async with open_routes(config, command) as calls:
            batch = BatchLines(calls, width=width)
            async with contextlib.aclosing(batch.run(lines, done)) as results:
                async for result in results:
                    out.write(result.line)
                    out.flush()
                    counts.see(result)
                    bar.update()
    await asyncio.to_thread(put_in_order, target)
    return counts


def put_in_order(target: Path) -> None:
    """Puts results, which were written as lines ended, into the order of the input; keeps their places in memory."""
    if not target.exists():
        return
    places: list[tuple[int, int, int]] = []
    with target.open("rb") as rows:
        for row in rows:
            places.append((line_number(msgspec.json.decode(row, type=_Row).id), rows.tell() - len(row), len(row)))
        if places == sorted(places):
            return
        ordered = Path(f"{target}.ordered")
        with ordered.open("wb") as out:
            for _, start, size in sorted(places):
                rows.seek(start)
                out.write(rows.read(size))
    os.replace(ordered, target)
