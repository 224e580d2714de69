from __future__ import annotations

import logging
import py_compile
import sys
from pathlib import Path
from types import ModuleType

import pytest

from frame.core.startup.bytecode import report_missing_bytecode


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package without bytecode, in a process that may not write any."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    made = ModuleType("large")
    made.__file__ = str(tmp_path / "large" / "__init__.py")
    (tmp_path / "large").mkdir()
    Path(made.__file__).write_text("")
    return made


def test_a_package_that_is_compiled_at_each_start_is_named(
    package: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    report_missing_bytecode(package)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("large has no bytecode")
    assert str(Path(str(package.__file__)).parent) in record.message


def test_no_warning_where_there_is_bytecode(package: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    py_compile.compile(str(package.__file__))
    report_missing_bytecode(package)
    assert not caplog.records


def test_no_warning_where_python_writes_bytecode(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    report_missing_bytecode(package)
    assert not caplog.records


@pytest.mark.parametrize("file", [None, "/somewhere/large/__init__.pyc", "/somewhere/large.so"])
def test_no_warning_for_a_package_without_sources(
    package: ModuleType, file: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    package.__file__ = file
    report_missing_bytecode(package)
    assert not caplog.records
