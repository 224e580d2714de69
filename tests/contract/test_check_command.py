"""`frame plugins check`: a table of checks and an exit status."""

from __future__ import annotations

import os

from frame.core.cli.main import main
from frame.core.testing import contract_run
from frame.core.testing.contract_run import Outcome


def test_a_good_plugin_gives_a_table_and_status_0(capsys, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--an-option-of-a-plugin-that-is-off")
    assert main(["plugins", "check", "priority"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "scheduling policy frame-llm:priority"
    assert "  pass  keys depend on the request alone" in lines
    assert lines[-1].endswith("0 failed, 0 skipped")
    assert os.environ["PYTEST_ADDOPTS"].startswith("--an")


def test_a_bad_one_gives_the_reason_and_status_1(capsys, monkeypatch):
    outcomes = [
        Outcome("one thing", "", "passed"),
        Outcome("another thing", "a", "passed"),
        Outcome("another thing", "b", "failed", "it broke"),
        Outcome("a third thing", "", "skipped", "no device"),
    ]
    monkeypatch.setattr(contract_run, "run_suite", lambda kind, **attributes: outcomes)
    assert main(["plugins", "check", "frame-llm:priority", "--kind", "scheduler"]) == 1
    assert capsys.readouterr().out.splitlines()[1:] == [
        "  pass  one thing",
        "  FAIL  another thing",
        "        [b] it broke",
        "  skip  a third thing",
        "        no device",
        "  2 passed, 1 failed, 1 skipped",
    ]


def test_an_unknown_name_is_one_sentence(capsys):
    assert main(["plugins", "check", "nonsense"]) == 1
    assert "no plugin 'nonsense'; `frame plugins` lists them" in capsys.readouterr().err
    assert main(["plugins", "check", "priorty"]) == 1
    assert "no plugin 'priorty' (did you mean priority?)" in capsys.readouterr().err
