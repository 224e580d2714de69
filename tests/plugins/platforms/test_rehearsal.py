"""A rehearsal that breaks off costs time, not the start."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

rehearsal = pytest.importorskip("frame.plugins.platforms.cuda.compile.rehearsal")
if rehearsal._async_compile is None:
    pytest.skip("this Triton cannot compile asynchronously", allow_module_level=True)


def submit(key: str, compile_kernel: Callable[[], Any], finalize: Callable[[Any], None]) -> Any:
    return rehearsal._async_compile.active_mode.get().submit(key, compile_kernel, finalize)


@pytest.mark.parametrize("fault", [None, IndexError("index 0 is out of bounds")], ids=["whole", "broken off"])
def test_what_was_launched_is_compiled(fault: Exception | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention backend that reads lengths on the host finds zeros there, since what writes them is not launched."""
    monkeypatch.setattr(rehearsal, "leave", lambda compile_kernel: compile_kernel())
    cache: dict[str, Any] = {}

    def run() -> None:
        for key in ("one", "two", "one"):
            placed = submit(key, lambda key=key: f"kernel {key}", lambda kernel, key=key: cache.update({key: kernel}))
            assert isinstance(placed, rehearsal.Unlaunched)
        if fault is not None:
            raise fault

    rehearsal.rehearse(run)
    assert cache == {"one": "kernel one", "two": "kernel two"}
    assert rehearsal._async_compile.active_mode.get() is None


def test_processes_share_what_is_met(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each runs all steps and compiles its part."""
    monkeypatch.setattr(rehearsal, "leave", lambda compile_kernel: (tmp_path / compile_kernel()).touch())

    def run() -> None:
        for number in range(8):
            submit(str(number), lambda number=number: f"{number} of {os.getppid()}", lambda kernel: None)

    assert len(rehearsal.compile_in_forks(run, 3)) == 8
    whose = dict(file.name.split(" of ") for file in tmp_path.iterdir())
    assert len(whose) == len(list(tmp_path.iterdir())) == 8
    assert [int(number) for number in sorted(whose) if whose[number] == str(os.getpid())] == [0, 3, 6]
    assert all(whose[number] == whose[str(int(number) % 3)] for number in whose)


def test_a_kernel_is_compiled_in_turn_with_other_workers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(rehearsal, "in_turn", lambda key, work: (tmp_path / key).touch())

    def run() -> None:
        for key in ("one", "two"):
            submit(key, lambda: None, lambda kernel: None)

    for rehearse in (rehearsal.rehearse, partial(rehearsal.rehearse, ahead=lambda: False)):
        rehearse(run)
        assert {file.name for file in tmp_path.iterdir()} == {"one", "two"}
        for file in tmp_path.iterdir():
            file.unlink()


def test_a_part_that_nobody_compiled_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rehearsal, "leave", lambda compile_kernel: None)
    mine = os.getpid()

    def run() -> None:
        if os.getpid() != mine:
            raise ValueError

    with pytest.raises(RuntimeError, match="2 of 3 processes that run steps failed"):
        rehearsal.compile_in_forks(run, 3)


def test_an_interrupt_ends_it() -> None:
    def run() -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        rehearsal.rehearse(run)
    assert rehearsal._async_compile.active_mode.get() is None
