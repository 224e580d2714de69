"""The adapters and resolvers that ship with frame, by their suites."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from frame.testing import AdapterResolverSuite, AdaptersSuite
from frame.testing.contract_run import run_suite


def write_lora(folder: Path, seed: int) -> None:
    """An adapter of rank 4 of the layer of the suite."""
    draw = torch.Generator().manual_seed(seed)
    name = "base_model.model.layer"
    tensors = {
        f"{name}.lora_A.weight": torch.randn(4, 32, generator=draw),
        f"{name}.lora_B.weight": torch.randn(24, 4, generator=draw),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 8}))


class TestLora(AdaptersSuite):
    plugin = "frame-llm:lora"

    def write(self, folder: Path, seed: int) -> None:
        write_lora(folder, seed)


def test_a_resolver_of_folders_is_tested_without_a_subclass() -> None:
    check = "a known name is a folder"
    (good,) = run_suite("adapter-resolver", plugin="frame-llm:folder", only=check)
    assert good.status == "passed"
    options = "frame.plugins.adapters.folder_options:FolderOptions"
    (wrong,) = run_suite(
        "adapter-resolver", target="tests.contract.wrong_adapters:Textual", options_model=options, only=check
    )
    assert wrong.status == "failed"
    assert "resolve must return a Path" in wrong.reason


@pytest.mark.parametrize(
    ("name", "check", "why"),
    [
        ("Certain", "odd names are unknown", "KeyError: 'no-such-adapter'"),
        ("Anywhere", "a file is no adapter", "a file was found where a folder must be"),
    ],
)
def test_wrong_resolvers_with_a_folder_are_found(name: str, check: str, why: str) -> None:
    options = "frame.plugins.adapters.folder_options:FolderOptions"
    target = f"tests.contract.wrong_adapters:{name}"
    failed = [
        one for one in run_suite("adapter-resolver", target=target, options_model=options) if one.status != "passed"
    ]
    assert check in {one.name for one in failed if one.status == "failed"}
    assert any(why in one.reason for one in failed)


class TestFolder(AdapterResolverSuite):
    plugin = "frame-llm:folder"
    known = "mine"

    def scratch_options(self) -> dict[str, str]:
        folder = self.scratch("root") / "mine"
        folder.mkdir(exist_ok=True)
        write_lora(folder, 1)
        return {"root": str(folder.parent)}
