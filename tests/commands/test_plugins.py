"""`frame plugins`: the table of plugins, and which suite `check` runs."""

from __future__ import annotations

import importlib
import json

import torch

from frame.core.cli.main import main
from frame.testing import suites


def test_plugins_table_and_json(capsys):
    assert main(["plugins"]) == 0
    text = capsys.readouterr().out
    assert "KIND" in text
    assert "frame-llm" in text
    assert main(["plugins", "--json", "--kind", "platform"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"kind", "name", "package", "version", "api", "status", "why"} <= set(rows[0])
    assert {row["kind"] for row in rows} == {"platform"}
    found = {row["name"]: (row["status"], row["why"]) for row in rows}
    assert found["cpu"] == ("usable", "")
    if not torch.cuda.is_available():
        assert found["cuda"] == ("unusable", "torch sees no CUDA device")
    assert main(["plugins", "--json", "--kind", "platform", "--quick"]) == 0
    assert {row["status"] for row in json.loads(capsys.readouterr().out)} == {"loaded"}


def test_checking_what_is_not_there(capsys):
    assert main(["plugins", "check", "zzz"]) == 1
    assert "'zzz'" in capsys.readouterr().err
    assert main(["plugins", "check", "frame-other:cpu"]) == 1
    assert "no plugin 'frame-other:cpu'" in capsys.readouterr().err
    assert main(["plugins", "check"]) == 1
    assert "needs the NAME of a plugin" in capsys.readouterr().err


def test_check_runs_the_suite_of_the_kind(tmp_path, capsys, monkeypatch):
    suite = (
        "from frame.core.plugin_host.registry import Registry\n"
        "class Suite:\n"
        "    plugin = ''\n"
        "    def test_it_is_there(self):\n"
        "        assert Registry.load().choose('platform', self.plugin).name == 'cpu'\n"
        "    def test_wrong(self):\n"
        "        assert {passes}\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, passes in (("passing_suite", True), ("failing_suite", False)):
        (tmp_path / f"{name}.py").write_text(suite.format(passes=passes))
        monkeypatch.setattr(suites, "SUITES", {"platform": importlib.import_module(name).Suite})
        assert main(["plugins", "check", "cpu"]) == (0 if passes else 1)
        text = capsys.readouterr().out
        assert "platform frame-llm:cpu" in text
        assert (" 2 passed" if passes else " 1 passed, 1 failed") in text
