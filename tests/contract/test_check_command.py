"""`frame plugins check`: a table of checks and an exit status."""

from __future__ import annotations

import os
import re

import pytest

from frame.core.cli.main import main
from frame.testing import contract_run
from frame.testing.contract_run import Outcome


def test_a_good_plugin_gives_one_line_and_status_0(capsys, monkeypatch):
    monkeypatch.setenv("PYTEST_ADDOPTS", "--an-option-of-a-plugin-that-is-off")
    assert main(["plugins", "check", "priority"]) == 0
    assert re.fullmatch(r"scheduling policy frame-llm:priority: \d+ passed\n", capsys.readouterr().out)
    assert os.environ["PYTEST_ADDOPTS"].startswith("--an")


OUTCOMES = [
    Outcome("one thing", "", "passed"),
    Outcome("another thing", "a", "passed"),
    Outcome("another thing", "b", "failed", "it broke"),
    Outcome("a third thing", "", "skipped", "no device"),
]


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        ([], ["1 passed, 1 skipped (-v says why)"]),
        (["-v"], ["1 passed, 1 skipped", "  pass  one thing", "  skip  a third thing", "        no device"]),
    ],
)
def test_what_is_skipped_is_told_when_asked(flags, lines, capsys, monkeypatch):
    monkeypatch.setattr(contract_run, "run_suite", lambda kind, **attributes: [OUTCOMES[0], OUTCOMES[3]])
    assert main(["plugins", "check", "priority", *flags]) == 0
    assert capsys.readouterr().out.partition(": ")[2].splitlines() == lines


@pytest.mark.parametrize("arguments", [["-v", "check", "priority"], ["check", "-v", "priority"]])
def test_flags_may_stand_before_the_name(arguments, capsys, monkeypatch):
    monkeypatch.setattr(contract_run, "run_suite", lambda kind, **attributes: [OUTCOMES[0]])
    assert main(["plugins", *arguments]) == 0
    assert "  pass  one thing" in capsys.readouterr().out


def test_an_argument_too_many_is_named(capsys):
    with pytest.raises(SystemExit):
        main(["plugins", "check", "-v", "priority", "fcfs"])
    assert (
        capsys.readouterr().err
        == "frame plugins: unexpected argument 'fcfs'; frame plugins --help shows what goes where\n"
    )


@pytest.mark.parametrize("flags", [[], ["--verbose"]])
def test_a_bad_one_gives_the_reason_and_status_1(flags, capsys, monkeypatch):
    monkeypatch.setattr(contract_run, "run_suite", lambda kind, **attributes: OUTCOMES)
    assert main(["plugins", "check", "frame-llm:priority", "--kind", "scheduler", *flags]) == 1
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.startswith("scheduling policy frame-llm:priority: 2 passed, 1 failed, 1 skipped")
    failed = ["  FAIL  another thing", "        [b] it broke"]
    others = ["  pass  one thing", "  skip  a third thing", "        no device"]
    assert lines == ([others[0], *failed, *others[1:]] if flags else failed)


def test_a_suite_that_runs_nothing_is_no_success(capsys, monkeypatch):
    monkeypatch.setattr(contract_run, "run_suite", lambda kind, **attributes: [])
    assert main(["plugins", "check", "priority"]) == 1
    assert capsys.readouterr().out.endswith(": no check ran\n")


def test_an_unknown_name_is_one_sentence(capsys):
    assert main(["plugins", "check", "unheard-of"]) == 1
    assert "no plugin 'unheard-of'; `frame plugins` lists them" in capsys.readouterr().err
    assert main(["plugins", "check", "priorty"]) == 1
    assert "no plugin 'priorty' (did you mean priority?)" in capsys.readouterr().err


def test_a_folder_is_told_what_it_lacks(capsys, tmp_path):
    assert main(["plugins", "check", str(tmp_path)]) == 1
    assert "is a folder, not the NAME of an installed plugin; it needs a pyproject.toml" in capsys.readouterr().err
    (tmp_path / "pyproject.toml").touch()
    assert main(["plugins", "check", str(tmp_path)]) == 1
    assert f"; pip install {tmp_path}" in capsys.readouterr().err


def test_an_error_that_no_check_raised_says_where_it_came_from():
    outcomes = contract_run.run_suite("scheduler", target="tests.contract.wrong_more:Breaking")
    reasons = {outcome.reason for outcome in outcomes if outcome.status == "failed"}
    assert any(re.fullmatch(r"TypeError: .*NoneType.* \(wrong_more\.py, line \d+\)", reason) for reason in reasons)
