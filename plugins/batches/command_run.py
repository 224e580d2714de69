"""Runs `frame run-batch`: answers a file of requests with an engine of its own and writes a file of results.

Each result is written when its line ends. A repeated run finds the results by their ids and continues after them. When
all lines have a result, the results are put into the order of the input.
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
    """How many lines ended how. `unserved` lines count as failed too; a repeated run tries them again."""

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
    """The fields of a result that a repeated run reads."""

    id: str
    response: dict[str, Any] | None = None


def read_ids(source: Path) -> list[str]:
    """The ids of all lines, in order."""
    with source.open("rb") as lines:
        return [line_id(number, line) for number, line in enumerate(lines, 1) if line.strip()]


def resume(target: Path, ids: Collection[str]) -> set[str]:
    """The ids of lines that need no second run.

    Keeps only complete, served results in the file. Raises `ConfigError` when it holds results of other lines.
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
                    f"{target} holds something else than results of this input: remove it, or name another file"
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
            batch = BatchLines(calls, width=lambda: width)
            async with contextlib.aclosing(batch.run(lines, done)) as results:
                async for result in results:
                    out.write(result.line)
                    out.flush()
                    counts.see(result)
                    bar.update()
    await asyncio.to_thread(put_in_order, target)
    return counts


def put_in_order(target: Path) -> None:
    """Sorts the results into the order of the input; holds only their places in memory, not their text."""
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
