"""`frame models`: architectures, folders, servers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from frame.core.cli.main import main
from tests.server.running import FAKE, server


def test_architectures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models"]) == 0
    assert "Qwen3ForCausalLM" in capsys.readouterr().out
    assert main(["models", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {"architecture": "Qwen3ForCausalLM", "family": "Qwen3"} in rows


def test_a_folder(capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).parents[2] / "plugins" / "models" / "demo"
    assert main(["models", str(demo), "--json"]) == 0
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["architecture"] == "LlamaForCausalLM"
    assert facts["served"]
    assert facts["parameters"] * 2 == facts["weights_bytes"] - header(demo / "model.safetensors")
    assert main(["models", str(demo)]) == 0
    assert "LlamaForCausalLM" in capsys.readouterr().out


def header(file: Path) -> int:
    return 8 + int.from_bytes(file.read_bytes()[:8], "little")


def test_a_folder_that_cannot_be_served(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", str(tmp_path)]) == 1
    assert "config.json" in capsys.readouterr().err
    config = {"architectures": ["NoSuchModel"], "vocab_size": 8, "max_position_embeddings": 64, "model_type": "llama"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes(b"not one")
    assert main(["models", str(tmp_path), "--json"]) == 1
    (facts,) = json.loads(capsys.readouterr().out)
    assert (facts["served"], facts["parameters"]) == (False, 0)
    assert "is not a safetensors file" in facts["problem"]


def test_a_folder_with_config_json_alone_has_the_sizes_that_follow_from_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    demo = Path(__file__).parents[2] / "plugins" / "models" / "demo"
    (tmp_path / "config.json").write_bytes((demo / "config.json").read_bytes())
    assert main(["models", str(demo), "--json"]) == 0
    (whole,) = json.loads(capsys.readouterr().out)
    assert main(["models", str(tmp_path), "--json"]) == 1
    (facts,) = json.loads(capsys.readouterr().out)
    assert facts["parameters"] == pytest.approx(whole["parameters"], rel=0.01)
    assert facts["weights_bytes"] == pytest.approx(whole["weights_bytes"], rel=0.01)
    assert "counted from config.json" in facts["problem"]


def test_weights_that_are_cut_short(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    demo = Path(__file__).parents[2] / "plugins" / "models" / "demo"
    (tmp_path / "config.json").write_bytes((demo / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((demo / "model.safetensors").read_bytes()[:100_000])
    assert main(["models", str(tmp_path), "--json"]) == 1
    (facts,) = json.loads(capsys.readouterr().out)
    assert not facts["served"]
    assert "shorter than its header says" in facts["problem"]


def test_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    with server(FAKE, "--served-model-name", "one", "two", "--api-key", "k") as running:
        assert main(["models", "--url", running.url, "--api-key", "k"]) == 0
        assert capsys.readouterr().out.split() == ["one", "two"]
        assert main(["models", "--url", running.url]) == 1
        assert "API key" in capsys.readouterr().err
