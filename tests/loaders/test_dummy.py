"""Random weights: only when asked for, the same for the same seed, finite and of a sane scale."""

import torch

from frame.core.config.tree import FrameConfig, LoadConfig, ModelConfig
from frame.plugins.loaders.dummy import DummyLoader


def filled(name, shape, seed=0):
    config = FrameConfig(model=ModelConfig(seed=seed), load=LoadConfig(load_format="dummy"))
    parameter = torch.full(shape, float("nan"))
    DummyLoader(None, config=config).fill(name, parameter)
    return parameter


def test_only_when_asked_for(tmp_path):
    assert "only when asked for" in DummyLoader(tmp_path, config=FrameConfig()).supports(tmp_path)
    asked = FrameConfig(load=LoadConfig(load_format="frame-llm:dummy"))
    assert DummyLoader(tmp_path, config=asked).supports(tmp_path) is None


def test_no_tensor_is_read(tmp_path):
    loader = DummyLoader(tmp_path, config=FrameConfig())
    assert list(loader.tensors()) == []
    assert not loader.complete


def test_values_follow_from_seed_and_name():
    assert torch.equal(filled("a.weight", (64, 64)), filled("a.weight", (64, 64)))
    assert not torch.equal(filled("a.weight", (64, 64)), filled("b.weight", (64, 64)))
    assert not torch.equal(filled("a.weight", (64, 64)), filled("a.weight", (64, 64), seed=1))


def test_scales():
    assert 0.02 < filled("mlp.weight", (64, 64)).std() < 0.04
    assert (filled("norm.weight", (64,)) - 1).abs().max() <= 0.1
    assert filled("mlp.bias", (64,)).abs().max() <= 0.01
