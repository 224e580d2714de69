"""A start waits for memory that processes which have just ended give back, and for no other."""

from __future__ import annotations

import time

import pytest

from frame.core.config.flat import from_flat
from frame.core.worker.start import model_loading
from frame.core.worker.start.model_loading import room_before
from frame.interfaces import MemorySnapshot


class Filled:
    """A device of 100 bytes, of which each snapshot finds the next number free."""

    def __init__(self, *free: int) -> None:
        self._free = list(free)

    def snapshot(self) -> MemorySnapshot:
        free = self._free.pop(0) if len(self._free) > 1 else self._free[0]
        return MemorySnapshot(total=100, free=free, held=0, peak=0)

    def lacks(self, start: MemorySnapshot, utilization: float, needed_bytes: int) -> str | None:
        return None if start.free >= utilization * start.total else f"{start.free} bytes are free"


@pytest.fixture(autouse=True)
def soon(monkeypatch) -> None:
    monkeypatch.setattr(model_loading, "GIVEN_BACK_SECONDS", 0.3)


def test_memory_that_is_given_back_is_waited_for() -> None:
    config = from_flat({"gpu_memory_utilization": 0.9})
    assert room_before(config, Filled(7, 7, 20, 50, 50, 80, 95)).free == 95


@pytest.mark.parametrize("free", [[7, 20], [20, *[19, 20] * 200]], ids=["still", "up and down"])
def test_memory_that_stays_taken_is_named_soon(free: list[int]) -> None:
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"(19|20) bytes are free"):
        room_before(from_flat({"gpu_memory_utilization": 0.9}), Filled(*free))
    assert 0.3 < time.monotonic() - began < 15
