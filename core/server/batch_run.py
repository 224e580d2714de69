"""`frame run-batch`: a file of requests through the routes of an engine of its own, into a file of results.

Results are written as lines end and found again by their ids, so that a run that was killed goes on where it was; when
all are there, they are put into the order of the input.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from ..config.checkpoint import read_checkpoint
from ..config.errors import ConfigError
from ..config.tree import FrameConfig
from ..front.progress_bar import Progress
from ..front.turn import build_parsers
from ..interfaces.client import EngineDeadError
from ..processes.client import start_engine
from ..registry import Registry
from .app import build_app, make_endpoints
from .batch_lines import LATER, BatchLines, LineResult, line_id, line_number
from .calls import RouteCalls
from .serving import ServingHost


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


@contextlib.asynccontextmanager
async def open_routes(config: FrameConfig, command: Sequence[str] | None = None) -> AsyncIterator[RouteCalls]:
    """Starts an engine and offers all routes over it; raises `ConfigError` with the cause when it does not start."""
    from ..front.async_llm import AsyncLLM

    try:
        client = await start_engine(config, command=command)
    except EngineDeadError as error:
        raise ConfigError(str(error)) from None
    try:
        host = ServingHost(config, client)
        checkpoint = read_checkpoint(config)
        llm = await asyncio.to_thread(lambda: AsyncLLM(config=config, client=client, checkpoint=checkpoint))
        registry = Registry.load()
        registry.add_files(config)
        host.open(llm, build_parsers(config, registry, llm.front))
        build_app(config, host, [one for one in make_endpoints(config, registry, host) if not one.admin])
        if host.calls is None:
            raise RuntimeError("the application has no routes")
        yield host.calls
        llm.shutdown()
    finally:
        await client.close()


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
    with Progress(progress, len(ids), "lines", "line") as bar, _lines(source) as lines, target.open("ab") as out:
        for _ in done:
            bar.advance()
        async with open_routes(config, command) as calls:
            batch = BatchLines(calls, max_line_bytes=config.server.max_body_bytes, width=width)
            async with contextlib.aclosing(batch.run(lines, done)) as results:
                async for result in results:
                    out.write(result.line)
                    out.flush()
                    counts.see(result)
                    bar.advance()
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


@contextlib.contextmanager
def _lines(source: Path) -> Iterator[Iterator[bytes]]:
    with source.open("rb") as file:
        yield iter(file)
