"""`frame collect-env`: sections, JSON, and nothing secret."""

from __future__ import annotations

import json

import pytest

from frame import __version__
from frame.core.cli.main import main


def test_report(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert main(["collect-env", "--json"]) == 0
    text = capsys.readouterr().out
    report = json.loads(text)
    assert set(report) == {"system", "packages", "torch", "GPUs", "plugins", "environment"}
    assert report["packages"]["frame-llm"] == __version__
    assert report["plugins"]["frame-llm"] == __version__
    assert "cuda available" in report["torch"]
    assert report["environment"]["OMP_NUM_THREADS"] == "1"
    assert "secret" not in text
    assert main(["collect-env", "--no-torch"]) == 0
    assert "\nplugins\n" in capsys.readouterr().out
