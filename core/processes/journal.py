"""The journal of an engine: which requests its launched steps hold, in memory that outlives the process.

The engine writes it, its supervisor reads it: after a death it tells which requests were being computed, and while the
engine lives it tells a busy engine from a hung one. A launch costs one copy of the step's slots.
"""

from __future__ import annotations

import hashlib
import mmap
import os

import numpy as np

from frame.ranks.standstill import Standing

from ..interfaces.step import StepPlan

#: Launched steps that it holds; there are never more in flight.
_STEPS = 32
_NAME_BYTES = 128
#: Most seconds between two beats of an engine that waits for work.
PULSE_SECONDS = 0.5
_HEADER = 9
_LAUNCHED, _ANSWERED, _SLOTS, _BEATS, _IDLE, _CLEARED, _STEP, _EXCHANGES, _STILL = range(_HEADER)


def journal_name(request_id: str) -> str:
    """The name of a request in the journal: its id, or a hash of an id that is too long."""
    data = request_id.encode()
    return request_id if len(data) <= _NAME_BYTES else f"#{hashlib.blake2b(data, digest_size=32).hexdigest()}"


class NullJournal:
    """Does nothing, for engines whose journal nobody reads."""

    def open(self, num_slots: int) -> None:
        """Makes room for steps of at most `num_slots` requests."""

    def launch(self, plan: StepPlan) -> None:
        """The step is about to be launched."""

    def retract(self) -> None:
        """The step launched last was not launched after all."""

    def answer(self) -> None:
        """The oldest launched step was answered."""

    def beat(self, idle: bool) -> None:
        """Counts a round of the loop, at least every `PULSE_SECONDS`; `idle`: what follows has no time limit."""

    def clear(self) -> None:
        """No request is under suspicion any more."""

    def stand(self, step: int, exchanges: int, still_seconds: float) -> None:
        """Where the engine is, as in `Standing`; from any thread."""


class Journal(NullJournal):
    """The writer's view of `descriptor`, which it owns."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._launched = 0
        self.open(0)  # the header counts beats before the engine is built

    def open(self, num_slots: int) -> None:
        size, names = _sizes(num_slots)
        os.ftruncate(self._descriptor, size)
        self._memory = mmap.mmap(self._descriptor, size)
        self._header = np.frombuffer(self._memory, np.int64, _HEADER)
        self._steps = np.frombuffer(self._memory, np.int32, _STEPS * (1 + num_slots), _HEADER * 8)
        self._steps = self._steps.reshape(_STEPS, 1 + num_slots)
        self._names = names
        self._header[_SLOTS] = num_slots

    def launch(self, plan: StepPlan) -> None:
        for new in plan.added:
            start = self._names + new.slot * _NAME_BYTES
            self._memory[start : start + _NAME_BYTES] = journal_name(new.request_id).encode().ljust(_NAME_BYTES, b"\0")
        count = len(plan.slots)
        row = self._steps[self._launched % _STEPS]
        row[1 : count + 1] = plan.slots
        row[0] = count
        self._launched += 1
        self._header[_LAUNCHED] = self._launched

    def retract(self) -> None:
        self._launched -= 1
        self._header[_LAUNCHED] = self._launched

    def answer(self) -> None:
        self._header[_ANSWERED] += 1

    def beat(self, idle: bool) -> None:
        self._header[_BEATS] += 1
        self._header[_IDLE] = idle

    def clear(self) -> None:
        self._header[_CLEARED] = 1

    def stand(self, step: int, exchanges: int, still_seconds: float) -> None:
        self._header[_STEP:] = step, exchanges, 1000 * still_seconds


class JournalReader:
    """Opens the memory of a journal, whose `descriptor` the writer inherits; reads it also after the writer's death."""

    def __init__(self) -> None:
        self.descriptor = os.memfd_create("frame-journal")

    def close(self) -> None:
        """Frees the memory, unless the writer still lives; may be called twice."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1

    @property
    def beats(self) -> int | None:
        """Rounds of the engine's loop so far; None while it does work without a time limit, or does not run yet."""
        header = self._header()
        return None if not header[_BEATS] or header[_IDLE] else int(header[_BEATS])

    @property
    def num_answered(self) -> int:
        """Steps that were answered."""
        return int(self._header()[_ANSWERED])

    @property
    def cleared(self) -> bool:
        """Whether the engine has computed all suspected requests without dying."""
        return bool(self._header()[_CLEARED])

    @property
    def standing(self) -> Standing:
        """Where the engine was when it noted that last; at 0 for 0 seconds before it did."""
        step, exchanges, still = self._header()[_STEP:].tolist()
        return Standing(step, exchanges, still / 1000)

    def in_flight(self) -> list[str]:
        """The requests of launched steps that were not answered, in the order of their slots."""
        header = self._header()
        launched, answered, num_slots = (int(header[field]) for field in (_LAUNCHED, _ANSWERED, _SLOTS))
        size, names = _sizes(num_slots)
        data = os.pread(self.descriptor, size, 0)
        if len(data) < size or not num_slots:
            return []
        steps = np.frombuffer(data, np.int32, _STEPS * (1 + num_slots), _HEADER * 8).reshape(_STEPS, 1 + num_slots)
        slots: set[int] = set()
        for step in range(max(answered, launched - _STEPS), launched):
            row = steps[step % _STEPS]
            slots.update(row[1 : 1 + row[0]].tolist())
        return [_name(data, names + slot * _NAME_BYTES) for slot in sorted(slots)]

    def _header(self) -> np.ndarray:
        data = b"" if self.descriptor < 0 else os.pread(self.descriptor, _HEADER * 8, 0)
        return np.frombuffer(data.ljust(_HEADER * 8, b"\0"), np.int64)


def _sizes(num_slots: int) -> tuple[int, int]:
    """(bytes of the whole, offset of the names)."""
    names = _HEADER * 8 + _STEPS * (1 + num_slots) * 4
    return names + num_slots * _NAME_BYTES, names


def _name(data: bytes, start: int) -> str:
    return data[start : start + _NAME_BYTES].rstrip(b"\0").decode(errors="replace")
