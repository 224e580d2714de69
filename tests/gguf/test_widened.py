"""Tensors of the types that stay in no blocks have the values that gguf gives them, and count as such."""

from __future__ import annotations

import logging

import gguf
import numpy as np
import pytest
import torch

from frame.core.config.flat import from_flat
from frame.core.plugin_host.model_sources import fetch_model
from frame.core.plugin_host.registry import Registry
from frame.interfaces import LazyTensor
from frame.plugins.gguf.types import BY_LIBRARY, BY_NAME
from frame.plugins.gguf.widened import WidenedTensor
from frame.plugins.platforms.cpu import HostMemory
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, running
from tests.gguf.drawn import random_blocks
from tests.gguf.files import write_gguf
from tests.gguf.test_files import refused
from tests.gguf.test_models import LIBRARY, WIDE, expected, served

KINDS = sorted(BY_LIBRARY)


class Blocks(LazyTensor):
    """Blocks that lie in memory."""

    def __init__(self, blocks: np.ndarray) -> None:
        self._blocks = torch.from_numpy(blocks)
        self.name, self.shape, self.dtype = "blocks", tuple(blocks.shape), torch.uint8

    def read(self, index: tuple[slice, ...] = ()) -> torch.Tensor:
        return self._blocks[index]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """(checkpoint with the values stored, its GGUF file)."""
    folder = tmp_path_factory.mktemp("widened")
    plain = make_checkpoint(folder / "plain", "llama-tied", **WIDE)
    return plain, write_gguf(plain, folder / "tiny-IQ2_XXS.gguf", LIBRARY)


@pytest.mark.parametrize("kind", KINDS)
def test_values_are_those_of_the_library(kind, monkeypatch):
    monkeypatch.setattr("frame.plugins.gguf.widened._AT_ONCE", 3 * 1024)
    blocks = random_blocks(kind, (7, 4), seed=3)
    want = gguf.dequantize(blocks.reshape(7, -1), gguf.GGMLQuantizationType[kind])
    tensor = WidenedTensor(Blocks(blocks), "w.weight", BY_NAME[kind])
    assert np.isfinite(want).all()
    assert np.abs(want).max() > 0
    assert (tensor.name, tensor.shape, tensor.dtype) == ("w.weight", (7, 1024), torch.float32)
    every = slice(None)
    for index in (
        (),
        (slice(2, 6),),
        (every, slice(256, 768)),
        (slice(1, 2), slice(100, 130)),
        (every, slice(0, 1023)),
    ):
        assert torch.equal(tensor.read(index), torch.from_numpy(want)[index])
    assert tensor.read((slice(3, 3), every)).shape == (0, 1024)


def test_the_log_says_what_is_dequantised(tiny, tmp_path, caplog):
    _, file = tiny
    with caplog.at_level(logging.INFO, "frame.plugins.gguf.widened"):
        served(file, tmp_path, 1)
    [line] = [one.getMessage() for one in caplog.records if "dequantised" in one.getMessage()]
    assert (
        "13 tensors (2 of IQ1_M, 2 of IQ1_S, 2 of IQ2_S, 1 of IQ2_XS, 2 of IQ2_XXS, 2 of IQ3_S, 2 of IQ3_XXS)" in line
    )


def test_memory_counts_the_values(tmp_path, monkeypatch):
    plain = make_checkpoint(tmp_path / "plain", "llama-tied", **WIDE)
    file = write_gguf(plain, tmp_path / "m.gguf", [("attn_|ffn_|token_embd", "IQ2_S")])
    counted = []
    kv_bytes = HostMemory.kv_bytes

    def noted(self, start, utilization, weights_bytes, full_bytes):
        counted.append(weights_bytes)
        return kv_bytes(self, start, utilization, weights_bytes, full_bytes)

    monkeypatch.setattr(HostMemory, "kv_bytes", noted)
    settings = {**SMALL, "download_dir": str(tmp_path / "cache"), "num_gpu_blocks_override": None}
    for model in (plain, file):
        with running(fetch_model(from_flat({**settings, "model": str(model)})), Registry.load()):
            pass
    assert counted[0] == counted[1] > 4 * 512 * 256


@pytest.mark.matrix
def test_two_ranks_hold_half_each_and_may_cut_blocks(tiny, tmp_path):
    plain, file = tiny
    assert served(file, tmp_path, 8, tensor_parallel_size=2) == expected(plain, 8)


def test_made_up_weights_are_in_full(tiny, tmp_path):
    first, second = (served(tiny[1], tmp_path, 8, load_format="dummy") for _ in range(2))
    assert first == second


def test_without_the_package_the_tensor_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.setattr("frame.plugins.gguf.file.find_spec", lambda name: None)
    text = refused(tiny[1], tmp_path)
    assert "tensor token_embd.weight has type IQ2_XS, which the package gguf reads and which is not installed" in text
    assert text.endswith("pip install 'frame-llm[gguf]'")


def test_another_package_of_that_name_is_named(tiny, tmp_path, monkeypatch):
    monkeypatch.delattr(gguf, "dequantize")
    text = refused(tiny[1], tmp_path)
    assert "the package gguf that is installed does not read IQ2_XS" in text
    assert text.endswith("pip install --upgrade 'frame-llm[gguf]'")


def test_a_truncated_file_is_named(tiny, tmp_path):
    data = tiny[1].read_bytes()
    short = tmp_path / "short.gguf"
    for size in (len(data) - 1, len(data) // 2, 3000):
        short.write_bytes(data[:size])
        text = refused(short, tmp_path / "cache")
        assert f"{short} " in text
        assert "truncated" in text
