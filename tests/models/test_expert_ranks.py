"""Families with routed experts over ranks that hold whole experts, also more ranks than experts: the logits of one."""

from __future__ import annotations

import random
from functools import cache

import pytest

from frame.interfaces import Mesh
from frame.testing.checkpoints import make_checkpoint
from frame.testing.families import experts
from frame.testing.ranks import run_mesh
from tests.models.dense import make_model, run

IDS = random.Random(3).choices(range(3, 512), k=40)
#: By the configuration's name for the number of experts, and where more of them are chosen by name too.
FEW = {
    "mixtral": {"num_local_experts": 3},
    "qwen2-moe": {"num_experts": 3},
    "gpt-oss": {"num_local_experts": 3},
    "llama4": {"num_local_experts": 3},
    "gemma4-moe": {"num_experts": 3},
}


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """The folder of a family's checkpoint, which nobody changes."""
    return cache(lambda family: make_checkpoint(tmp_path_factory.mktemp("published"), family))


def assert_near(logits, reference):
    assert (logits - reference).abs().max() < 2e-4 * reference.abs().max()


@pytest.mark.parametrize("family", experts.ROWS)
def test_ranks_with_whole_experts_give_the_logits_of_one(family, published):
    folder = published(family)
    expected = run(make_model(folder), IDS, [40])
    mesh = Mesh(tensor=2, expert_parallel=True)
    for logits in run_mesh(mesh, lambda groups: run(make_model(folder, groups=groups), IDS, [40])):
        assert_near(logits, expected)


@pytest.mark.parametrize("family", FEW)
def test_fewer_experts_than_ranks(family, tmp_path):
    folder = make_checkpoint(tmp_path, family, **FEW[family])
    expected = run(make_model(folder), IDS, [40])
    mesh = Mesh(tensor=4, expert_parallel=True)
    for logits in run_mesh(mesh, lambda groups: run(make_model(folder, groups=groups), IDS, [40])):
        assert_near(logits, expected)
