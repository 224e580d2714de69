"""How long the candidates of a product take on this device, measured once and kept beside Triton's kernels.

A start measures only shapes that the file of its device and versions lacks: some tenths of a second, once. Knows no
layer and no step.
"""

from __future__ import annotations

import hashlib
import logging
import os
import time
from bisect import bisect_left
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from importlib.metadata import version
from itertools import cycle, pairwise
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import msgspec
import torch
from torch import Tensor
from triton import knobs

import frame.kernels

from .candidates import CUBLAS, MOST_SOME_ROWS, Product, Shape, candidates

logger = logging.getLogger("frame.platforms.cuda.products")

#: By shape and rows the microseconds of each candidate.
Table = dict[Shape, dict[int, dict[str, float]]]
#: Rows for which candidates are measured: tiles have 128 rows, and the library's kernels change at about as many. What
#: there is for up to 8 and 16 rows takes about the same time for fewer.
POINTS = (1, 8, 16, 32, 64, 96, 128, 160, 192, 256, 320, 384, 448, 512, 768, 1024, 2048, 4096)
#: Operations of the largest product that is measured; above it what was best there stays so.
MOST_OPERATIONS = 2e12
#: Rows of a weight as wide as a head that are measured: a step has logits of its last tokens only.
HEAD_OUTPUTS, HEAD_ROWS = 65536, 512
#: The part of the library's time that another candidate must save to be chosen: less is noise.
MARGIN = 0.98
#: Weights are read in turn, from more memory than the L2 cache holds.
_CACHE_BYTES = 120 << 20
_MOST_COPIES = 64
#: What is timed is captured: so many launches, or as many as take about so long at the rates of an H200. Kernels of few
#: rows begin while the one before them ends, so that a single launch would say little.
_MOST_LAUNCHES, _TIMED_SECONDS, _TIMED_SECONDS_OF_FEW = 8, 60e-6, 300e-6
_BYTES_A_SECOND, _OPERATIONS_A_SECOND = 4.27e12, 690e12
_REPEATS = 3


def measured(met: Mapping[Shape, Tensor], device: torch.device, max_rows: int) -> Table:
    """The table for the shapes of the weights `met`, from the file or measured now; empty where nothing can be."""
    if device.type != "cuda" or not met:
        return {}
    file, start = _file(device), time.perf_counter()
    known, table, lacking = _read(file), Table(), False
    for shape, weight in met.items():
        wanted = points_of(shape, max_rows)
        kept = known.setdefault(str(shape), {})
        if any(kept.get(str(rows), {}).keys() != candidates(rows, shape, device).keys() for rows in wanted):
            lacking = True
            kept.update({str(rows): times for rows, times in time_candidates(shape, weight, wanted).items()})
        table[shape] = {rows: kept[str(rows)] for rows in wanted}
    if lacking:
        _write(file, known)
        logger.info("products of %d shapes measured in %.2f s", len(met), time.perf_counter() - start)
    return table


def packed(table: Table) -> bytes:
    """A table as JSON, for other workers."""
    return msgspec.json.encode(
        [(one.outputs, one.inputs, one.gated, str(one.dtype).removeprefix("torch."), table[one]) for one in table]
    )


def unpacked(data: bytes) -> Table:
    """The table that a worker `packed`."""
    rows = msgspec.json.decode(data, type=list[tuple[int, int, bool, str, dict[int, dict[str, float]]]])
    return {
        Shape(outputs, inputs, gated, getattr(torch, dtype)): points for outputs, inputs, gated, dtype, points in rows
    }


def points_of(shape: Shape, max_rows: int) -> list[int]:
    """The rows for which a shape is measured, in steps of up to `max_rows`."""
    most = min(max_rows, HEAD_ROWS if shape.outputs >= HEAD_OUTPUTS and not shape.gated else max_rows)
    most = min(most, int(MOST_OPERATIONS / (2 * shape.outputs * shape.inputs)))
    return [rows for rows in POINTS if rows <= most] or [1]


def best_of(points: Mapping[int, Mapping[str, float]], rows: int, allowed: Collection[str]) -> str:
    """The candidate of `allowed` that takes least time at the measured numbers of rows next to `rows`, on both sides.

    It is cuBLAS where nothing saves more than noise, or nothing was measured.
    """
    known = sorted(points)
    above = bisect_left(known, rows)
    around = known[above : above + 1]
    if above and (not around or (around[0] != rows and rows > MOST_SOME_ROWS)):
        around.append(known[above - 1])
    times = {
        name: sum(points[at][name] for at in around)
        for name in allowed
        if around and all(name in points[at] for at in around)
    }
    best = min(times, key=times.__getitem__, default=CUBLAS)
    return best if times.get(best, 0.0) < MARGIN * times.get(CUBLAS, float("inf")) else CUBLAS


def time_candidates(shape: Shape, weight: Tensor, wanted: Iterable[int]) -> dict[int, dict[str, float]]:
    """Microseconds by rows and candidate: the least of some launches, which read copies of the weight in turn."""
    device, wanted = weight.device, list(wanted)
    x = torch.randn(max(wanted), shape.inputs, dtype=shape.dtype, device=device)
    copies = max(1, min(_MOST_COPIES, -(-_CACHE_BYTES // weight.nbytes)))
    weights = cycle([weight, *(weight.clone() for _ in range(copies - 1))])
    captured: list[tuple[int, str, int, torch.cuda.CUDAGraph]] = []
    pool, stream = torch.cuda.graph_pool_handle(), torch.cuda.Stream(device)
    for rows in wanted:
        for name, call in candidates(rows, shape, device).items():
            call(x[:rows], weight, None)  # the library loads a kernel with its first launch
            captured.append((rows, name, *_record(call, x[:rows], weights, stream, pool)))
    times: dict[int, dict[str, float]] = {rows: {} for rows in wanted}
    with torch.cuda.stream(stream):
        for rows, name, count, graph in captured:
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(_REPEATS + 1)]
            marks[0].record()
            for mark in marks[1:]:
                graph.replay()
                mark.record()
            marks[-1].synchronize()
            times[rows][name] = min(one.elapsed_time(other) for one, other in pairwise(marks)) * 1e3 / count
    return times


def _record(
    call: Product, x: Tensor, weights: Iterator[Tensor], stream: torch.cuda.Stream, pool: Any
) -> tuple[int, torch.cuda.CUDAGraph]:
    """(launches, their capture): replayed, they take the device's time, without what the host takes to launch."""
    weight = next(weights)
    least = max(weight.nbytes / _BYTES_A_SECOND, 2 * len(x) * weight.numel() / _OPERATIONS_A_SECOND)
    seconds = _TIMED_SECONDS_OF_FEW if len(x) <= MOST_SOME_ROWS else _TIMED_SECONDS
    count, graph = max(1, min(_MOST_LAUNCHES, int(seconds / least))), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream(x.device))
    with torch.cuda.stream(stream):
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")  # other threads ask NCCL's events
        try:
            for _ in range(count):
                call(x, next(weights), None)
        finally:
            graph.capture_end()
    return count, graph


def _file(device: torch.device) -> Path:
    """The file, whose name holds everything that the times depend on."""
    sources = sorted(
        Path(path, name)
        for path in frame.kernels.__path__
        for name in ("linear.py", "linear_rows.py", "linear_hopper.py")
    )
    facts = [
        torch.cuda.get_device_name(device), torch.__version__, str(torch.version.cuda), version("triton"),
        *(source.read_text(encoding="utf-8") for source in (*sources, Path(__file__).with_name("candidates.py"))),
    ]  # fmt: skip
    name = hashlib.sha256("\0".join(facts).encode()).hexdigest()[:32]
    return Path(knobs.cache.dir, f"frame-products-{name}.json")


def _read(file: Path) -> dict[str, dict[str, dict[str, float]]]:
    """What earlier starts measured; nothing where the file is not there or is not such a file."""
    with suppress(OSError, ValueError, msgspec.ValidationError):
        return msgspec.json.decode(file.read_bytes(), type=dict[str, dict[str, dict[str, float]]])
    return {}


def _write(file: Path, known: Mapping[str, Mapping[str, Mapping[str, float]]]) -> None:
    """Writes the file atomically; where it cannot be written, the next start measures again."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        with NamedTemporaryFile(dir=file.parent, suffix=".json", delete=False) as made:
            made.write(msgspec.json.encode(known))
        os.replace(made.name, file)
    except OSError as error:
        logger.warning("the times of products are not kept, as %s cannot be written: %s", file, error)
