"""What tells blocks of different models, element types and layouts apart, and what must not."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from frame.core.interfaces.attention import AttentionSpec, BlockFormat
from frame.core.interfaces.kv import FullKV, KVLayout
from frame.core.interfaces.kv_layout import plan_layout, with_blocks
from frame.core.worker.start.numerics import block_numerics, model_digest
from frame.interfaces import LoaderSetup
from frame.plugins.loaders.dummy import DummyLoader
from frame.plugins.loaders.safetensors import SafetensorsLoader

SPEC = AttentionSpec(
    num_heads=2, num_kv_heads=1, head_dim=4, scale=1.0, dtype=torch.float32, kv_dtype=torch.float32, block_size=16,
    device_type="cpu",
)  # fmt: skip
FULL = FullKV(num_kv_heads=1, head_dim=4, dtype="float32")
LAYOUT = plan_layout({"a": FULL})


class Backend:
    order = (0, 1, 2, 3)

    def __init__(self, spec: AttentionSpec = SPEC) -> None:
        self.spec = spec

    def kv_format(self, spec: AttentionSpec) -> BlockFormat:
        return BlockFormat((2, spec.block_size, spec.num_kv_heads, spec.head_dim), self.order, spec.kv_dtype, 1)


class OtherOrder(Backend):
    order = (1, 0, 2, 3)


def digest(layout: KVLayout = LAYOUT, backend: Any = None, **facts: Any) -> str:
    return block_numerics(layout, [backend or Backend()], {"dtype": "float32", **facts})


def test_equal_workers_agree_whatever_their_pools() -> None:
    assert digest(with_blocks(LAYOUT, 0, 1000)) == digest()


@pytest.mark.parametrize(
    "other",
    [
        lambda: digest(backend=OtherOrder()),
        lambda: digest(backend=Backend(replace(SPEC, kv_dtype=torch.float16))),
        lambda: digest(platform="cuda"),
        lambda: digest(plan_layout({"b": FULL})),
        lambda: digest(plan_layout({"a": FULL}, 32)),
    ],
)
def test_what_changes_a_block_changes_the_digest(other: Callable[[], str]) -> None:
    assert other() != digest()


TENSORS = {"w": torch.arange(600.0).view(20, 30), "b": torch.ones(30), "scale": torch.tensor(0.5)}


def model(folder: Path, tensors: dict[str, Tensor] = TENSORS, split: bool = False, **config: Any) -> str:
    """The digest of a checkpoint of these tensors, in one file or two."""
    folder.mkdir()
    names = sorted(tensors)
    for number, part in enumerate((names[1:], names[:1]) if split else (names,)):
        save_file({name: tensors[name] for name in part}, folder / f"model-{number}.safetensors")
    loader = SafetensorsLoader(LoaderSetup(folder, seed=0))
    return model_digest({"hidden_size": 30, **config}, loader, (torch.float32, torch.float32))


def test_copies_of_a_model_have_one_digest(tmp_path: Path) -> None:
    first = model(tmp_path / "one", transformers_version="5.1")
    assert first == model(tmp_path / "other", split=True, transformers_version="5.2", _name_or_path="other")


def test_other_weights_types_and_sizes_have_other_digests(tmp_path: Path) -> None:
    changed: list[dict[str, Tensor]] = [
        {**TENSORS, "w": TENSORS["w"] + 0.01},
        {**TENSORS, "b": TENSORS["b"].bfloat16()},
        {**TENSORS, "b": TENSORS["b"].to(torch.float8_e4m3fn)},
        {**TENSORS, "scale": torch.tensor(0.25)},
        {**TENSORS, "w": TENSORS["w"].view(30, 20)},
        {name: tensor for name, tensor in TENSORS.items() if name != "scale"},
        {**TENSORS, "none": torch.zeros(0, 3)},
    ]
    found = {model(tmp_path / str(number), tensors) for number, tensors in enumerate(changed)}
    found |= {model(tmp_path / "plain"), model(tmp_path / "configured", rope_theta=1e6)}
    assert len(found) == len(changed) + 2


def test_made_up_weights_are_told_by_their_seed(tmp_path: Path) -> None:
    def dummy(seed: int, *dtypes: torch.dtype, **config: Any) -> str:
        loader = DummyLoader(LoaderSetup(tmp_path, named=True, seed=seed))
        return model_digest(json.loads(json.dumps(config)), loader, dtypes or (torch.float32, torch.float32))

    assert dummy(1) == dummy(1)
    others = [dummy(1), dummy(2), dummy(1, torch.float32, torch.float8_e4m3fn), dummy(1, hidden_size=4)]
    assert len(set(others)) == 4
