"""Random weights: only when asked for, the same for the same seed, finite and of a sane scale."""

import time
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.interfaces import Groups, LoaderSetup, Mesh
from frame.plugins.loaders.dummy import DummyLoader
from frame.testing import run_mesh
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, greedy, prompts, running
from frame.testing.thread_executor import with_threads
from tests.models.dense import make_model


def filled(name, shape, seed=0):
    parameter = torch.full(shape, float("nan"))
    DummyLoader(LoaderSetup(Path(), named=True, seed=seed)).fill(name, parameter, shape)
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


class Counting(DummyLoader):
    """Counts the elements that it makes."""

    made = 0

    def fill(self, name, part, shape, index=()):
        self.made += part.numel()
        super().fill(name, part, shape, index)


def parts_of(folder, groups):
    """(the slots of a rank's model, whose weights are made up; the elements that were made)."""
    loader = Counting(LoaderSetup(folder, named=True))
    model = make_model(folder, groups=groups, loader=loader)
    slots = [slot for module in model.modules() for slot in getattr(module, "weight_slots", list)()]
    return [slot for slot in slots if slot.is_read and not slot.covers and not slot.optional], loader.made


def held(slot):
    return slot.target(slot.parameter).reshape(torch.empty(slot.shape, device="meta")[slot.index].shape)


MESHES = {
    "tp2": Mesh(tensor=2),
    "tp4": Mesh(tensor=4),
    "pp2": Mesh(pipeline=2),
    "tp2-ep": Mesh(tensor=2, expert_parallel=True),
}


@pytest.mark.parametrize(
    ("family", "name"),
    [
        *(("qwen3-moe", name) for name in MESHES),
        *((family, name) for family in ("llama-tied", "phi3", "olmo2", "gpt2") for name in ("tp2", "tp4", "pp2")),
    ],
)
def test_ranks_make_their_parts_of_one_model_and_no_more(family, name, tmp_path):
    mesh, folder = MESHES[name], make_checkpoint(tmp_path, family)
    slots, made = parts_of(folder, Groups.single())
    whole = {slot.name: torch.full(slot.shape, float("nan")) for slot in slots}
    for slot in slots:
        whole[slot.name][slot.index] = held(slot)
    assert not any(tensor.isnan().any() for tensor in whole.values())
    assert made == sum(tensor.numel() for tensor in whole.values())
    found = run_mesh(mesh, lambda groups: parts_of(folder, groups))
    for of_rank, count in found:
        assert all(torch.equal(held(slot), whole[slot.name][slot.index]) for slot in of_rank)
        assert count == sum(held(slot).numel() for slot in of_rank) < 0.8 * made
    # together they hold everything
    for slot in (slot for of_rank, _ in found for slot in of_rank):
        whole[slot.name][slot.index] = float("nan")
    assert all(tensor.isnan().all() for tensor in whole.values())


def test_engines_of_any_size_serve_the_same_made_up_model(tmp_path):
    folder = make_checkpoint(tmp_path, "qwen3-moe")
    values = {**SMALL, "model": str(folder), "num_threads": 1, "load_format": "dummy", "executor": "threads"}

    def tokens(**settings):
        with running(from_flat(values | settings), with_threads(Registry.load())) as engine:
            return greedy(engine, prompts(400))

    alone = tokens()
    assert tokens(tensor_parallel_size=2) == alone
    assert tokens(tensor_parallel_size=2, enable_expert_parallel=True) == alone
    assert tokens(pipeline_parallel_size=2) == alone


def test_scales():
    assert 0.02 < filled("mlp.weight", (64, 64)).std() < 0.04
    assert (filled("norm.weight", (64,)) - 1).abs().max() <= 0.1
    assert filled("mlp.bias", (64,)).abs().max() <= 0.01


def test_a_part_without_elements_is_left():
    """That of a rank which holds nothing of a tensor."""
    loader = DummyLoader(LoaderSetup(Path("."), named=True))
    loader.fill("x.weight", torch.empty(0, 4), (6, 4), (slice(3, 3), slice(None)))
    loader.fill("y.weight", torch.empty(2, 0), (2, 4), (slice(None), slice(4, 4)))


class Counted(TorchDispatchMode):
    """Counts operations, each a launch on a device."""

    num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += not func.is_view
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("near", [None, (1.0, 0.5)])
def test_each_of_many_experts_is_one_launch(near):
    """Thousands are filled at a start."""
    loader, part, shape = DummyLoader(LoaderSetup(Path(), named=True)), torch.empty(32, 64), (64, 128)
    index, given = (slice(32, 64), slice(64, 128)), {} if near is None else {"near": near}
    loader.fill("experts.0.up_proj.weight", part, shape, index, **given)
    found = [part.clone()]
    with Counted() as counted:
        for expert in (1, 2, 3):
            loader.fill(f"experts.{expert}.up_proj.weight", part, shape, index, **given)
        assert counted.num == 3
    found.append(part)
    assert not torch.equal(*found)


def test_a_part_of_a_tensor_in_several_blocks_is_what_the_tensor_has():
    loader, shape = DummyLoader(LoaderSetup(Path(), named=True)), (3, 70, 100_000)
    whole = filled("experts.w", shape)
    for index in ((slice(1, 3), slice(35, 66)), (slice(0, 3, 2), slice(1, 70, 3), slice(7, 90_000, 2))):
        part = torch.empty(whole[index].shape)
        loader.fill("experts.w", part, shape, index)
        assert torch.equal(part, whole[index])


@pytest.mark.parametrize("shape", [(48, 64), (2100, 2100), (70_000, 128)])
def test_rows_and_columns_differ(shape):
    """In a tensor of one block, of two, and of three with many rows."""
    values = filled("experts.0.up_proj.weight", shape)
    assert len(values.unique(dim=0)) == shape[0]
    assert len(values.T.unique(dim=0)) == shape[1]
    assert abs(values.mean()) < 0.002


def test_many_short_rows_are_filled_at_once():
    """As stored experts have them; a part that is not contiguous gets what it has in the whole tensor."""
    shape = (2, 70_000, 3, 2)
    loader = DummyLoader(LoaderSetup(Path(), named=True))
    start = time.perf_counter()
    whole = filled("model.layers.0.mlp.experts.gate_up_proj_blocks", shape)
    assert time.perf_counter() - start < 5
    wide = torch.full((2, 500, 3, 4), float("nan"))
    part = wide[..., 1:3]
    index = (slice(0, 2), slice(69_000, 69_500))
    loader.fill("model.layers.0.mlp.experts.gate_up_proj_blocks", part, shape, index)
    assert torch.equal(part, whole[:, 69_000:69_500])
