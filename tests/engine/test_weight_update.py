"""Other weights are taken whole, or the old ones are there again, or the engine says that it is broken."""

from __future__ import annotations

from typing import Any

import pytest

from frame.core.engine.weight_update import update_weights
from frame.core.interfaces.client import BrokenEngineError

NEW = {"model": "/new", "revision": None, "load_format": None}


class Recorder:
    """Stands for the executor and for the scheduler; `failing` holds the calls that raise."""

    def __init__(self, *failing: tuple[str, dict[str, Any]], free: bool = True) -> None:
        self.failing = failing
        self.free = free
        self.calls: list[Any] = []

    def call(self, method: str, arguments: dict[str, Any]) -> list[Any]:
        self.calls.append((method, arguments))
        if (method, arguments) in self.failing:
            raise ValueError(f"{method} of {arguments.get('model')}\nfails")
        return [None]

    def preempt_all(self) -> None:
        self.calls.append("preempt")

    def reset_prefix_cache(self) -> bool:
        self.calls.append("reset")
        return self.free


def update(part: Any) -> None:
    update_weights(part, part, NEW)


def test_everything_is_checked_before_anything_is_dropped() -> None:
    part = Recorder()
    update(part)
    assert part.calls == [("check_weights", NEW), "preempt", "reset", ("update_weights", NEW)]
    part = Recorder(("check_weights", NEW))
    with pytest.raises(RuntimeError, match=r"^the old weights serve on: check_weights of /new fails$"):
        update(part)
    assert part.calls == [("check_weights", NEW)]


def test_blocks_that_cannot_be_dropped_keep_the_old_weights() -> None:
    part = Recorder(free=False)
    with pytest.raises(RuntimeError, match="requests still load blocks"):
        update(part)
    assert ("update_weights", NEW) not in part.calls


def test_weights_that_end_half_way_are_taken_back() -> None:
    part = Recorder(("update_weights", NEW))
    with pytest.raises(RuntimeError, match="the old weights serve on: update_weights of /new fails"):
        update(part)
    assert part.calls[-1] == ("update_weights", {})
    part = Recorder(("update_weights", NEW), ("update_weights", {}))
    with pytest.raises(BrokenEngineError, match="neither the new nor the old weights can be read"):
        update(part)
