"""Engines that balance their experts give the tokens of one rank before, while and after experts move."""

from __future__ import annotations

import pytest

from frame.core.config.flat import from_flat
from frame.core.plugin_host.registry import Registry
from frame.interfaces import LoadTrace, Mesh
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
    return [worker._worker.runner.balance for worker in engine.executor._workers]


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
        assert sum(balance.num_received for balance in found) > 0
        assert served(engine, wanted()) == expected
    tokens = sum(len(prompt) for prompt in prompts(400)) + len(expected) * (NUM_TOKENS - 1)
    records = list(LoadTrace(trace))
    assert records
    # each token has two experts, and is counted once though both ranks compute it
    assert max(record.loads.sum(1).max() for record in records) <= 2 * tokens
