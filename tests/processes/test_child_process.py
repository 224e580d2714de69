"""Errors of child processes as one sentence."""

from __future__ import annotations

import pytest

from frame.core.config.errors import ConfigError
from frame.core.processes.child_process import describe


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("a\n  b"), "a b"),
        (KeyError("a"), "KeyError: 'a'"),
        (AssertionError(), "AssertionError"),
        (MemoryError(), "this process gets no more memory of the machine"),
        (MemoryError("for a list"), "this process gets no more memory of the machine: for a list"),
    ],
)
def test_describe(error: BaseException, said: str) -> None:
    assert describe(error) == said
