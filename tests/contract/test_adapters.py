"""The adapters and resolvers that ship with frame, by their suites."""

from __future__ import annotations

import json
from pathlib import Path

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


class TestFolder(AdapterResolverSuite):
    plugin = "frame-llm:folder"
    known = "mine"

    def scratch_options(self) -> dict[str, str]:
        folder = self.scratch("root") / "mine"
        folder.mkdir(exist_ok=True)
        write_lora(folder, 1)
        return {"root": str(folder.parent)}
