"""Random weights: only when asked for, the same for the same seed, finite and of a sane scale."""

from pathlib import Path

import torch

from frame.interfaces import LoaderSetup
from frame.plugins.loaders.dummy import DummyLoader


def filled(name, shape, seed=0):
    parameter = torch.full(shape, float("nan"))
    DummyLoader(LoaderSetup(Path(), named=True, seed=seed)).fill(name, parameter)
    return parameter


def test_only_when_asked_for(tmp_path):
    assert "only when asked for" in DummyLoader(LoaderSetup(tmp_path)).supports(tmp_path)
    assert DummyLoader(LoaderSetup(tmp_path, named=True)).supports(tmp_path) is None


def test_no_tensor_is_read(tmp_path):
    loader = DummyLoader(LoaderSetup(tmp_path))
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
