"""Engines that balance their experts give the tokens of one rank before, while and after experts move."""

from __future__ import annotations

import numpy as np
import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.interfaces import LoadTrace, Mesh
from frame.settings import PluginError
from frame.testing.checkpoints import make_checkpoint
from frame.testing.engines import SMALL, drain, prompts, request, running, tokens_of
from frame.testing.thread_executor import with_threads
from tests.worker.test_lockstep import started, wait_for

#: Experts are placed again all the time.
OFTEN = {"enable_eplb": True, "eplb_window_size": 8, "eplb_step_interval": 6}
NUM_TOKENS = 60


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("experts"), "qwen3-moe")


def wanted():
    return [request(f"{place}", prompt, NUM_TOKENS) for place, prompt in enumerate(prompts(400))]


def served(engine, requests):
    return {name: tokens_of(found) for name, found in drain(engine, requests).items()}


@pytest.fixture(scope="module")
def expected(folder):
    with running(from_flat({**SMALL, "model": str(folder), "num_threads": 1}), Registry.load()) as engine:
        return served(engine, wanted())


def balances(engine):
    return [worker._worker.runner.balance for worker in engine.executor.team]


@pytest.mark.some(1)
@pytest.mark.parametrize("redundant", [0, 4])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_two_ranks_that_balance_give_the_tokens_of_one(folder, expected, redundant, asynchronous, tmp_path):
    trace = tmp_path / "loads.jsonl"
    values = {
        **SMALL, **OFTEN, "model": str(folder), "num_threads": 1, "tensor_parallel_size": 2, "executor": "threads",
        "enable_expert_parallel": True, "num_redundant_experts": redundant, "eplb_use_async": asynchronous,
        "eplb_record": str(trace),
    }  # fmt: skip
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        assert served(engine, wanted()) == expected
        found = balances(engine)
        moved = [balance.num_placements for balance in found]
        assert moved[0] > 1
        assert moved[0] == moved[1]
        stats, received = engine.stats(), sum(balance.num_received for balance in found)
        assert received == found[0].num_copies == found[1].num_copies > 0
        assert (stats.num_expert_placements, stats.num_expert_copies) == (moved[0], received)
        assert 0.5 <= stats.expert_balancedness < 1
        assert served(engine, wanted()) == expected
    tokens = sum(len(prompt) for prompt in prompts(400)) + len(expected) * (NUM_TOKENS - 1)
    records = list(LoadTrace(trace))
    assert records
    # each token has two experts, and is counted once though both ranks compute it
    assert max(record.loads.sum(1).max() for record in records) <= 2 * tokens


@pytest.mark.parametrize("asynchronous", [True, pytest.param(False, marks=pytest.mark.matrix)])
def test_log_probabilities_do_not_change_while_experts_move(folder, asynchronous):
    """Nor before or after: each token's, and those of its best rivals, beside those of one rank."""

    def told(engine):
        asked = [request(f"{place}", prompt, NUM_TOKENS, logprobs=5) for place, prompt in enumerate(prompts(400)[:3])]
        outputs = drain(engine, asked)
        rows = [[np.ravel(one.logprobs.logprobs) for one in found if one.logprobs] for found in outputs.values()]
        return [np.concatenate(one) for one in rows]

    values = {**SMALL, "model": str(folder), "num_threads": 1}
    with running(from_flat(values), Registry.load()) as engine:
        alone = told(engine)
    values |= {**OFTEN, "tensor_parallel_size": 2, "executor": "threads", "enable_expert_parallel": True}
    values |= {"num_redundant_experts": 4, "eplb_use_async": asynchronous}
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        found = told(engine)
        assert balances(engine)[0].num_placements > 1
    for one, other in zip(alone, found, strict=True):
        assert len(one) == 6 * NUM_TOKENS
        np.testing.assert_allclose(one, other, atol=1e-4)


def served_by_ranks(folder, tmp_path, mesh, requests, **settings):
    """Tokens by name, and the balances of all workers; the second engine has a third of the requests."""
    ranks = started(folder, tmp_path, mesh, **{**OFTEN, **settings})
    found = []
    for place, one in enumerate(requests):
        ranks[place % 3 == 2].messages.put(lambda engine, one=one: engine.add(one))
    tokens = wait_for(ranks, len(requests))
    for rank in ranks:
        rank.messages.put(lambda engine: found.extend(balances(engine)))
        rank.end()
    return tokens, found


@pytest.mark.parametrize(
    ("tensor", "redundant", "exchange", "asynchronous"),
    [
        (1, 4, "gather", True),
        pytest.param(1, 2, "all-to-all", False, marks=pytest.mark.matrix),
        pytest.param(2, 4, "all-to-all", True, marks=pytest.mark.matrix),
        pytest.param(2, 0, "gather", False, marks=pytest.mark.matrix),
    ],
)
def test_engines_that_balance_give_the_tokens_of_one(
    folder, expected, tensor, redundant, exchange, asynchronous, tmp_path
):
    tokens, found = served_by_ranks(
        folder, tmp_path, Mesh(data=2, tensor=tensor, expert_parallel=True), wanted(), expert_exchange=exchange,
        num_redundant_experts=redundant, eplb_use_async=asynchronous,
    )  # fmt: skip
    assert tokens == expected
    assert len(found) == 2 * tensor
    moved = [balance.num_placements for balance in found]
    assert moved[0] > 1
    assert len(set(moved)) == 1
    assert len({balance.balancedness for balance in found}) == 1
    assert sum(balance.num_received for balance in found) > 0


def test_weights_are_read_into_the_slots_that_experts_came_to(folder, expected):
    values = {
        **SMALL, **OFTEN, "model": str(folder), "num_threads": 1, "tensor_parallel_size": 2, "executor": "threads",
        "enable_expert_parallel": True, "num_redundant_experts": 4,
    }  # fmt: skip
    with running(from_flat(values), with_threads(Registry.load())) as engine:
        served(engine, wanted())
        before = [balance._maps.placement.expert_of.tolist() for balance in balances(engine)]
        assert before[0] != [[slot % 8 for slot in range(12)]] * len(before[0])
        engine.executor.call("update_weights")
        assert served(engine, wanted()) == expected


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "enable_eplb moves whole experts between devices, which needs enable_expert_parallel"),
        ({"enable_expert_parallel": True}, "enable_eplb needs several devices"),
        ({"enable_expert_parallel": True, "tensor_parallel_size": 2, "deterministic": True}, "deterministic does not"),
        (
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "num_redundant_experts": 3},
            "num_redundant_experts 3: 11 slots for 8 experts do not divide over 2 devices but over 11; "
            "with num_redundant_experts 4 they divide over 2$",
        ),
        (
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "num_redundant_experts": 9},
            "17 slots for 8 experts do not divide over 2 devices but over 17; with num_redundant_experts 10 they",
        ),
        ({"enable_eplb": False, "num_redundant_experts": 2}, "num_redundant_experts 2 needs enable_eplb"),
        ({"enable_eplb": False, "eplb_record": "/x"}, "eplb_record '/x' needs enable_eplb"),
        (
            {"enable_expert_parallel": True, "tensor_parallel_size": 2, "expert_balancer": "even"},
            "no expert balancer 'even'",
        ),
    ],
)
def test_what_cannot_be_balanced_is_refused(folder, settings, said):
    values = {**SMALL, "model": str(folder), "enable_eplb": True, "executor": "threads", **settings}
    with (
        pytest.raises((ValueError, PluginError), match=said),
        running(from_flat(values), with_threads(Registry.load())),
    ):
        pass


def test_a_model_without_experts_is_refused(tmp_path):
    make_checkpoint(tmp_path, "llama")
    values = {**SMALL, "model": str(tmp_path), "enable_eplb": True, "executor": "threads", "tensor_parallel_size": 2}
    values |= {"enable_expert_parallel": True}
    with (
        pytest.raises(ValueError, match="model LlamaForCausalLM has no experts"),
        running(from_flat(values), with_threads(Registry.load())),
    ):
        pass
