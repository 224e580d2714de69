"""Layers divided into pipeline stages: which stage has which, and what a stage knows of the others."""

import pytest
import torch
from hypothesis import given, strategies as st
from torch import nn

from frame.core.interfaces.collectives import Groups, UnconnectedGroup
from frame.core.layers.stages import Stage, split_layers
from frame.core.layers.weights import load_weights
from frame.interfaces import Model, ModelSetup
from tests.layers.test_weights import MemoryLoader, make_build

pytestmark = pytest.mark.product


def counts(*args):
    return [len(layers) for layers in split_layers(*args)]


def test_extra_layers_go_before_the_last_stage():
    assert counts(10, 4) == [2, 3, 3, 2]
    assert counts(7, 4) == [2, 2, 2, 1]
    assert counts(9, 4) == [2, 2, 3, 2]
    assert counts(5, 2) == [3, 2]
    assert counts(6, 3, (1, 3, 2)) == [1, 3, 2]


@given(st.integers(1, 200), st.integers(1, 64))
def test_any_split_is_whole_and_even(num_layers, num_stages):
    if num_stages > num_layers:
        with pytest.raises(ValueError, match=f"use {num_layers}"):
            split_layers(num_layers, num_stages)
        return
    stages = split_layers(num_layers, num_stages)
    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    sizes = [len(stage) for stage in stages]
    assert max(sizes) - min(sizes) <= 1
    assert sizes[-1] == min(sizes)


@pytest.mark.parametrize(
    ("chosen", "said"),
    [
        ((3, 3), "3,3 counts the layers of 2 pipeline stages, and there are 3"),
        ((0, 3, 3), "0,3,3 leaves a pipeline stage without a layer"),
        ((2, 2, 3), "2,2,3 counts 7 layers in all, and the model has 6"),
    ],
)
def test_counts_that_do_not_fit(chosen, said):
    with pytest.raises(ValueError, match=said):
        split_layers(6, 3, chosen)


class Stacked(Model):
    def __init__(self, setup, tied):
        build = setup.build
        super().__init__(setup)
        self.embedding = build.embedding("embed", 10, 4)
        self.layers = build.layers(5, lambda index: Layer(build, f"layers.{index}"))
        self.head = build.head("head", 4, 10, tied=self.embedding if tied else None)

    def forward(self, inputs, step):
        raise NotImplementedError

    def logits(self, hidden):
        return self.head(hidden)


class Layer(nn.Module):
    def __init__(self, build, name):
        super().__init__()
        self.linear = build.linear(f"{name}.linear", 4, 4)
        self.attention = build.attention(f"{name}.attention", 2, 2, 2, scale=1.0)


def checkpoint(tied):
    torch.manual_seed(0)
    tensors = {f"layers.{index}.linear.weight": torch.randn(4, 4) for index in range(5)}
    tensors["embed.weight"] = torch.randn(10, 4)
    return tensors if tied else {**tensors, "head.weight": torch.randn(10, 4)}


def built(rank, size, tied=False, tensors=None, **changes):
    build = make_build()
    build.groups = Groups.of(pipeline=UnconnectedGroup(rank, size)) if size > 1 else Groups.single()
    for name, value in changes.items():
        setattr(build, name, value)
    model = Stacked(ModelSetup(build), tied)
    loader = MemoryLoader(checkpoint(tied) if tensors is None else tensors)
    load_weights(model, loader)
    return build, model, loader


@pytest.mark.parametrize("tied", [False, True])
def test_a_stage_reads_its_own_tensors(tied):
    tensors = checkpoint(tied)
    found: list[str] = []
    for rank, here in enumerate(([0, 1], [2, 3], [4])):
        _, model, loader = built(rank, 3, tied)
        expected = {f"layers.{index}.linear.weight" for index in here}
        if rank == 0 or (tied and rank == 2):
            expected.add("embed.weight")
        if rank == 2 and not tied:
            expected.add("head.weight")
        assert set(loader.reads) == expected
        assert not any(parameter.is_meta for parameter in model.parameters())
        for index, layer in zip(here, model.layers, strict=True):
            assert torch.equal(layer.linear.weight, tensors[f"layers.{index}.linear.weight"])
        found += [name for name, _ in model.named_parameters() if name.startswith("layers.")]
    _, whole, _ = built(0, 1, tied)
    assert found == [name for name, _ in whole.named_parameters() if name.startswith("layers.")]


def test_all_stages_know_all_caches():
    whole = {name: layer.kv_spec() for name, layer in built(0, 1)[0].caches.items()}
    for rank in range(2):
        caches = built(rank, 2)[0].caches
        assert list(caches) == list(whole)
        assert {name: layer.kv_spec() for name, layer in caches.items()} == whole


def test_a_tied_head_on_the_last_stage():
    tensors = checkpoint(tied=True)
    _, model, _ = built(1, 2, tied=True)
    hidden = torch.randn(3, 4)
    torch.testing.assert_close(model.logits(hidden), hidden @ tensors["embed.weight"].T)


def test_parts_of_another_stage_cannot_be_called():
    _, first, _ = built(0, 2)
    with pytest.raises(RuntimeError, match="head belongs to another pipeline stage"):
        first.logits(torch.zeros(1, 4))
    _, last, _ = built(1, 2)
    with pytest.raises(RuntimeError, match="embed belongs to another pipeline stage"):
        last.embedding(torch.zeros(1, dtype=torch.int32))


@pytest.mark.parametrize("missing", ["layers.0.linear.weight", "layers.4.linear.weight", "embed.weight", "head.weight"])
def test_every_stage_misses_a_tensor_of_any(missing):
    tensors = checkpoint(tied=False)
    del tensors[missing]
    for rank in range(2):
        with pytest.raises(ValueError, match=f"1 missing: {missing}"):
            built(rank, 2, tensors=tensors)


def test_stages_by_place():
    assert [built(rank, 3)[0].stage for rank in range(3)] == [
        Stage(True, False),
        Stage(False, False),
        Stage(False, True),
    ]
    assert built(0, 1)[0].stage == Stage(True, True)


def test_chosen_layers():
    assert len(built(0, 2, pipeline_layers=(1, 4))[1].layers) == 1
    with pytest.raises(ValueError, match="2,2 counts 4 layers in all, and the model has 5"):
        built(0, 2, pipeline_layers=(2, 2))
