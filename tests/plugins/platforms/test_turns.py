"""Processes that would leave the same in a cache take turns."""

from __future__ import annotations

import fcntl
from pathlib import Path

import pytest

turns = pytest.importorskip("frame.plugins.platforms.cuda.compile.turns")


def test_who_works_keeps_others_with_the_same_key_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "cache"
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    calls = []

    def work() -> None:
        (lock,) = folder.iterdir()
        with lock.open("wb") as file, pytest.raises(BlockingIOError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        turns.in_turn("another key", lambda: calls.append(len(list(folder.iterdir()))))

    turns.in_turn("a key", work)
    assert calls == [2]
    assert not list(folder.iterdir())


def test_an_error_lets_the_next_one_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))

    def fail() -> None:
        raise ValueError("no kernel")

    for _ in range(2):
        with pytest.raises(ValueError, match="no kernel"):
            turns.in_turn("a key", fail)
    assert not list(tmp_path.iterdir())


def test_a_cache_that_cannot_be_written_to_holds_nobody_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "file" / "cache"))
    calls: list[int] = []
    turns.in_turn("a key", lambda: calls.append(1))
    assert calls == [1]
