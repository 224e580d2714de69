from __future__ import annotations

import importlib
import logging
import py_compile
import sys
from pathlib import Path
from types import ModuleType

import pytest

from frame.core.bytecode import report_missing_bytecode


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A package without bytecode, in a process that may not write any."""
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    monkeypatch.setattr(sys, "pycache_prefix", None)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "large", raising=False)
    (tmp_path / "large").mkdir()
    (tmp_path / "large" / "__init__.py").write_text("")
    return importlib.import_module("large")


def test_a_package_that_is_compiled_at_each_start_is_named(
    package: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    report_missing_bytecode(package)
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert record.message.startswith("large has no bytecode")
    assert str(Path(str(package.__file__)).parent) in record.message


def test_nothing_is_said_where_there_is_bytecode(package: ModuleType, caplog: pytest.LogCaptureFixture) -> None:
    py_compile.compile(str(package.__file__))
    report_missing_bytecode(package)
    assert not caplog.records


def test_nothing_is_said_where_python_writes_it(
    package: ModuleType, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    report_missing_bytecode(package)
    assert not caplog.records
