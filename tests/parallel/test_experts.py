"""Experts that are few, or of which few get all tokens: ranks that share them give the tokens of one."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.interfaces import Mesh
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, prompts, request, running, tokens_of
from frame.testing.thread_executor import with_threads
from tests.worker.test_lockstep import started, wait_for

pytestmark = pytest.mark.product

#: By how many experts there are, and which of them get all tokens, one each; () for any two.
CASES = {
    "one expert": (1, ()),
    "fewer experts than ranks": (3, ()),
    "all tokens to the first rank": (4, (0, 1)),
    "all tokens to the last rank": (4, (2, 3)),
}
#: Tensor ranks alone, and engines that share experts by an exchange.
WAYS = {
    "four tensor ranks": (Mesh(tensor=4, expert_parallel=True), ""),
    "two engines that gather": (Mesh(data=2, expert_parallel=True), "gather"),
    "two engines that send": (Mesh(data=2, expert_parallel=True), "all-to-all"),
    "two engines of two ranks": (Mesh(data=2, tensor=2, expert_parallel=True), "all-to-all"),
}


def make_experts(folder, count, chosen):
    """A checkpoint whose routers prefer one of two `chosen` experts by the sign of a product, and no other."""
    heads = {"num_attention_heads": 4, "num_key_value_heads": 4}
    make_checkpoint(folder, "qwen3-moe", num_experts=count, num_experts_per_tok=1 if chosen else min(count, 2), **heads)
    if chosen:
        tensors = load_file(folder / "model.safetensors")
        for name in [name for name in tensors if name.endswith("mlp.gate.weight")]:
            rows = torch.zeros_like(tensors[name])
            rows[chosen[0]], rows[chosen[1]] = tensors[name][0], -tensors[name][0]
            tensors[name] = rows
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def wanted():
    return [request(f"{place}", prompt, 8) for place, prompt in enumerate(prompts(400))]


def served(values, registry):
    with running(from_flat({**SMALL, "num_threads": 1, **values}), registry) as engine:
        return {name: tokens_of(found) for name, found in drain(engine, wanted()).items()}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("case", CASES)
def test_ranks_that_share_experts_give_the_tokens_of_one(case, way, tmp_path):
    mesh, exchange = WAYS[way]
    folder = make_experts(tmp_path / "model", *CASES[case])
    expected = served({"model": str(folder)}, Registry.load())
    if mesh.data == 1:
        settings = {"tensor_parallel_size": mesh.tensor, "enable_expert_parallel": True, "executor": "threads"}
        assert served({"model": str(folder), **settings}, with_threads(Registry.load())) == expected
        return
    ranks = started(folder, tmp_path, mesh, exchange)
    for place, one in enumerate(wanted()):
        ranks[place % 3 == 2].messages.put(lambda engine, one=one: engine.add(one))
    found = wait_for(ranks, len(expected))
    for rank in ranks:
        rank.end()
    assert found == expected
