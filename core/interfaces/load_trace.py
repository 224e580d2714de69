"""Traces of expert loads: JSON lines, first a header, then one record for each window of steps.

    {"format": "frame-expert-loads", "version": 1, "num_layers": 2, "num_experts": 4, "expert_bytes": 9}
    {"step": 1000, "num_steps": 1000, "loads": [[12, 0, 7, 1], [5, 5, 5, 5]]}

`step` is the step after which the window ended, `num_steps` counts its steps, dummies left out, and `loads` [L, E] are
the tokens that each expert of each layer got from all ranks. A whole line ends in a newline, so a trace that was cut
off shows it. The header may also have `num_groups`, 1 by default. Knows no worker.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np

_FORMAT, _VERSION = "frame-expert-loads", 1
#: The most experts of all layers together that a trace may have: a record of them takes about 20 MB of text.
_MAX_LOADS = 1 << 20
_MAX_LINE = _MAX_LOADS * 24
_MAX_LOAD = 1 << 53


class TraceHeader(msgspec.Struct, frozen=True, kw_only=True):
    """The model of a trace: its MoE layers, experts of a layer, groups that its router knows, weights of one expert."""

    format: str = _FORMAT
    version: int = _VERSION
    num_layers: int
    num_experts: int
    num_groups: int = 1
    expert_bytes: int = 0

    def problem(self) -> str | None:
        """Why this is no header of a trace, or None."""
        if (self.format, self.version) != (_FORMAT, _VERSION):
            return f"it is {self.format!r} version {self.version}, expected {_FORMAT!r} version {_VERSION}"
        if min(self.num_layers, self.num_experts, self.num_groups) < 1 or self.expert_bytes < 0:
            return "num_layers, num_experts and num_groups must be at least 1, expert_bytes at least 0"
        if self.num_layers * self.num_experts > _MAX_LOADS:
            return f"{self.num_layers} layers of {self.num_experts} experts are above {_MAX_LOADS:,} in all"
        return None


class _Line(msgspec.Struct, kw_only=True):
    step: int
    num_steps: int
    loads: list[list[int]]


@dataclass(frozen=True, eq=False)
class LoadRecord:
    """The tokens of a window, int64 [L, E], the number of its steps, and the step after which it ended."""

    loads: np.ndarray
    num_steps: int
    step: int


class LoadTraceWriter:
    """Writes a trace, a line at a time, so that a file is readable while it grows. Raises `OSError`."""

    def __init__(self, path: Path, header: TraceHeader) -> None:
        if problem := header.problem():
            raise ValueError(f"no trace can be written: {problem}")
        self._shape = (header.num_layers, header.num_experts)
        self._file = path.open("wb")
        self._write(header)

    def write(self, record: LoadRecord) -> None:
        """Appends a window; raises `ValueError` for loads of another shape than the header's."""
        if record.loads.shape != self._shape:
            raise ValueError(f"loads have the shape {list(record.loads.shape)}, the trace has {list(self._shape)}")
        self._write(_Line(step=record.step, num_steps=record.num_steps, loads=record.loads.tolist()))

    def _write(self, line: msgspec.Struct) -> None:
        self._file.write(msgspec.json.encode(line) + b"\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file. May be called twice."""
        self._file.close()


class LoadTrace:
    """A trace that is read: `header`, and the records by iterating, as often as wanted, one in memory at a time.

    Raises `ValueError`, in one sentence, for a file that is no trace, and while iterating for a line that is none.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with self._open() as file:
            line = self._line(file, 1)
        try:
            self.header = msgspec.json.decode(line, type=TraceHeader)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{path} is no trace of expert loads: its first line is wrong: {error}") from None
        if problem := self.header.problem():
            raise ValueError(f"{path} is no trace of expert loads that can be read: {problem}")

    def __iter__(self) -> Iterator[LoadRecord]:
        with self._open() as file:
            self._line(file, 1)
            number = 2
            while line := self._line(file, number):
                yield self._record(line, number)
                number += 1
        if number == 2:
            raise ValueError(f"{self.path} has no records")

    def _open(self) -> BinaryIO:
        try:
            return self.path.open("rb")
        except OSError as error:
            raise ValueError(f"{self.path} cannot be read: {error.strerror}") from None

    def _line(self, file: BinaryIO, number: int) -> bytes:
        line = file.readline(_MAX_LINE)
        if line and not line.endswith(b"\n"):
            if len(line) == _MAX_LINE:
                raise ValueError(f"line {number} of {self.path} is above {_MAX_LINE:,} bytes")
            raise ValueError(
                f"{self.path} is cut off in line {number}; remove that line to use the {number - 1} before it"
            )
        return line

    def _record(self, line: bytes, number: int) -> LoadRecord:
        shape = (self.header.num_layers, self.header.num_experts)
        where = f"line {number} of {self.path} is no record"
        try:
            found = msgspec.json.decode(line, type=_Line)
        except msgspec.MsgspecError as error:
            raise ValueError(f"{where}: {error}") from None
        if len(found.loads) != shape[0] or any(len(row) != shape[1] for row in found.loads):
            raise ValueError(f"{where}: its loads are not {shape[0]} layers of {shape[1]} experts")
        if any(min(row) < 0 or max(row) > _MAX_LOAD for row in found.loads):
            raise ValueError(f"{where}: its loads are not all between 0 and {_MAX_LOAD}")
        return LoadRecord(np.array(found.loads, dtype=np.int64), found.num_steps, found.step)
