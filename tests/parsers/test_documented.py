"""The parser that docs/tools.md shows keeps the contract and is found in its file."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.registry import Registry
from frame.testing.contract_run import run_suite
from tests.docs.blocks import ROOT, marked_file


def test_the_parser_of_the_docs_keeps_the_contract(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "at_lines.py"
    file.write_text(marked_file(ROOT / "docs" / "tools.md", "at_lines.py"), encoding="utf-8")
    monkeypatch.delitem(sys.modules, "at_lines", raising=False)
    config = FrameConfig.from_flat(tool_parser_plugin=str(file), tool_call_parser="at_lines")
    registry = Registry.load()
    registry.check(config)
    example = registry.choose("tool-parser", "at_lines").tags["example"]
    outcomes = run_suite("tool-parser", target="at_lines:AtLinesParser", example=example)
    assert [outcome for outcome in outcomes if outcome.status != "passed"] == []
    monkeypatch.delitem(sys.modules, "at_lines")
