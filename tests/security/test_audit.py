"""The audit says what services answered, no more: found, clean, unanswered and impossible are told apart."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest

_SPEC = importlib.util.spec_from_file_location("audit", Path(__file__).parents[2] / ".ci" / "audit.py")
assert _SPEC is not None
assert _SPEC.loader is not None
AUDIT = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(AUDIT)
CLEAN = {"name": "good", "version": "1.0", "vulns": []}
BAD = {"name": "bad", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "ours", "skip_reason": "not found"}
OFFLINE = "requests.exceptions.ConnectionError: name resolution failed"


def fake_tool(folder: Path, answers: Any) -> Path:
    """A pip-audit that answers by service: packages, or what it prints before it fails."""
    tool = folder / "pip-audit"
    tool.write_text(
        f"#!{sys.executable} -S\nimport json, sys\nanswers = json.loads({json.dumps(answers)!r})\n"
        "answer = answers[sys.argv[sys.argv.index('--vulnerability-service') + 1]]\n"
        "if isinstance(answer, str):\n    sys.exit(answer)\n"
        "print(json.dumps({'dependencies': answer, 'fixes': []}))\n"
        "sys.exit(any(package.get('vulns') for package in answer))\n"
    )
    tool.chmod(0o700)
    return tool


@pytest.mark.parametrize(
    ("answers", "status", "said"),
    [
        ({"pypi": [CLEAN, UNKNOWN]}, 0, "audit: pypi: 0 advisories for 1 packages; 1 are unknown to it\n"),
        ({"pypi": [CLEAN, BAD]}, 1, "bad 2.0: PYSEC-1, mended in 2.1\naudit: pypi: 1 advisories for 2 packages"),
        ({"pypi": OFFLINE, "osv": [BAD]}, 1, "audit: osv: 1 advisories"),
        ({"pypi": [UNKNOWN], "osv": OFFLINE}, 0, "so nothing was audited\n"),
        ({"pypi": OFFLINE, "osv": OFFLINE}, 0, "so nothing was audited\n"),
        ({"pypi": "error: requirement line 3 is wrong"}, 2, "audit: error: requirement line 3 is wrong\n"),
    ],
)
def test_each_outcome_has_its_words_and_status(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], answers: Any, status: int, said: str
) -> None:
    found = AUDIT.main(["--pip-audit", str(fake_tool(tmp_path, answers)), str(tmp_path / "pins.txt")])
    text = "".join(capsys.readouterr())
    assert (found, said in text) == (status, True), text


def test_a_missing_tool_is_no_clean_audit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert AUDIT.main(["--pip-audit", str(tmp_path / "none"), str(tmp_path / "pins.txt")]) == 2
    assert "cannot be run" in capsys.readouterr().err
