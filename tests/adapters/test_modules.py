"""`frame serve` refuses an adapter that cannot be one before it starts any process or reads any weight."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from frame.core.cli.main import main
from frame.core.processes import launcher


def written(folder: Path, config: object, weights: str | None = "adapter_model.safetensors") -> None:
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    if weights is not None:
        (folder / weights).write_bytes(b"")


GOOD = {"peft_type": "LORA", "r": 4, "lora_alpha": 8}
WRONG: dict[str, tuple[Callable[[Path], object], str]] = {
    "nowhere": (lambda folder: None, "there is no folder {folder} for the adapter 'sql'"),
    "file": (lambda folder: folder.write_text(""), "there is no folder {folder} for the adapter 'sql'"),
    "empty": (lambda folder: folder.mkdir(), "{folder} has no adapter_config.json"),
    "no-json": (lambda folder: written(folder, "{"), "{folder}/adapter_config.json cannot be read"),
    "dora": (
        lambda folder: written(folder, {**GOOD, "use_dora": True}),
        "{folder}/adapter_config.json: use_dora asks for a magnitude",
    ),
    "pickle": (lambda folder: written(folder, GOOD, "adapter_model.bin"), "{folder}/adapter_model.bin is a pickle"),
    "no-weights": (lambda folder: written(folder, GOOD, None), "{folder} has no adapter_model.safetensors"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_folder_that_is_no_adapter_is_one_sentence_before_anything_starts(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launcher, "launch", lambda config: pytest.fail("processes were started"))
    make, message = WRONG[name]
    folder = tmp_path / "sql"
    make(folder)
    assert main(["serve", "--enable-lora", "--lora-modules", f"sql={folder}"]) == 1
    text = capsys.readouterr().err.strip()
    assert f"lora_modules: {message.format(folder=folder)}" in text
    assert len(text.splitlines()) == 1


def test_an_adapter_that_may_be_served_is_not_read_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it fits the model is known once there is one; the command has imported no torch by then."""
    written(tmp_path / "sql", GOOD)
    code = (
        "import sys\nfrom frame.core.cli.main import main\nfrom frame.core.processes import launcher\n"
        "launcher.launch = lambda config: 7\n"
        f"assert main(['serve', '--enable-lora', '--lora-modules', 'sql={tmp_path}/sql']) == 7\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
