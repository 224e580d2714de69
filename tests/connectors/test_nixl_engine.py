"""Engines in two processes, with real models and real agents: one computes prompts, the other reads their blocks."""

from __future__ import annotations

import os
import signal

import pytest

from frame.plugins.connectors.nixl import agent as nixl_agent
from frame.testing.checkpoints import make_checkpoint
from tests.connectors.nixl_prompts import BLOCK_SIZE, Asked, Prefill, open_engine

pytest.importorskip("nixl")

SIZES = (90, 17, 64, 5)
CACHED = [size - 1 if size > BLOCK_SIZE else 0 for size in SIZES]


def prompts(shift=0):
    return [[3 + (7 * i * (j + 1) + j + shift) % 400 for i in range(size)] for j, size in enumerate(SIZES)]


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def model(request, tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), request.param)


@pytest.fixture(scope="module")
def secret(tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "secret"
    path.write_text("a secret of the tests")
    return path


@pytest.fixture(scope="module")
def sides(model, secret):
    """(process of the prefill engine, requests to the decode engine); one test may kill the process, the last."""
    there = Prefill(model, secret)
    try:
        with open_engine(model, secret, retry_seconds=0) as engine:
            there.wait_ready()
            yield there, Asked(engine)
    finally:
        there.close()


def check(sides, name, prompt, cached):
    """The prompt travels: as many tokens of it are not computed, and the output is that of one engine."""
    there, here = sides
    here.add(name, prompt, there.prefill(prompt))
    tokens = here.finish(name)
    assert here.num_cached(name) == cached
    assert tokens == here.alone(prompt)


@pytest.mark.some(1)
def test_tokens_equal_those_of_one_engine_and_only_missing_blocks_travel(sides):
    there, here = sides
    for number, prompt in enumerate(prompts()):
        check(sides, f"d{number}", prompt, CACHED[number])
    travelled = here.counter("loaded_blocks")
    check(sides, "longer", prompts()[0] + [9] * 20, 109)
    num_groups = len(here.engine.scheduler._layout.groups)
    assert 0 < here.counter("loaded_blocks") - travelled <= (112 - 88) // BLOCK_SIZE * num_groups + num_groups - 1
    assert here.counter("failed_blocks") == 0
    assert there.usage() == here.rest() == 0


def test_many_at_once(sides):
    there, here = sides
    given = [prompt for shift in range(20, 24) for prompt in prompts(shift)]
    for number, prompt in enumerate(given):
        here.add(f"m{number}", prompt, there.prefill(prompt))
        here.step()
    found = [here.finish(f"m{number}") for number in range(len(given))]
    assert found == [here.alone(prompt) for prompt in given]
    assert here.counter("failed_blocks") == 0
    assert there.usage() == here.rest() == 0


def test_after_sleep_blocks_are_read_at_other_addresses(sides):
    there, here = sides
    there.ask(call="sleep")
    there.ask(call="wake_up")
    check(sides, "s0", prompts(40)[0], CACHED[0])
    here.rest()
    here.engine.call("sleep", {})
    here.engine.call("wake_up", {})
    check(sides, "s1", prompts(41)[0], CACHED[0])
    assert there.usage() == here.rest() == 0


def test_a_prefill_engine_that_dies_while_it_is_read_costs_the_computation(sides, monkeypatch):
    there, here = sides
    check(sides, "k0", prompts(60)[0], CACHED[0])
    second, third = (prompts(shift)[0] for shift in (61, 62))
    params, later = there.prefill(second), there.prefill(third)
    begin = nixl_agent.Agent._begin

    def die(agent, read):
        there.process.send_signal(signal.SIGKILL)
        there.process.wait()
        return begin(agent, read)

    monkeypatch.setattr(nixl_agent.Agent, "_begin", die)
    here.add("k1", second, params)
    assert here.finish("k1") == here.alone(second)
    assert there.process.returncode == -signal.SIGKILL
    assert here.counter("failed_blocks") > 0
    here.add("k2", third, later)
    assert here.finish("k2") == here.alone(third)
    assert here.num_cached("k2") == 0
    assert here.rest() == 0


def test_a_prefill_engine_that_stands_still_while_it_is_read_costs_the_computation(secret, tmp_path, monkeypatch):
    """Its bytes come once it goes on, into blocks that nobody has got meanwhile."""
    model, begin = make_checkpoint(tmp_path, "llama"), nixl_agent.Agent._begin
    options = {"stall_seconds": 0.5, "lookup_seconds": 60, "ucx_config": "TLS=tcp,NET_DEVICES=lo"}
    there = Prefill(model, secret, options=options)

    def stop(agent, read):
        there.process.send_signal(signal.SIGSTOP)
        os.waitpid(there.process.pid, os.WUNTRACED)
        return begin(agent, read)

    try:
        with open_engine(model, secret, **options) as engine:
            there.wait_ready()
            here, abandoned = Asked(engine), engine.scheduler.lifecycle.abandoned
            params = there.prefill(prompts()[0])
            with monkeypatch.context() as patch:
                patch.setattr(nixl_agent.Agent, "_begin", stop)
                here.add("d", prompts()[0], params)
                tokens = here.finish("d")
            assert tokens == here.alone(prompts()[0])
            assert here.num_cached("d") == here.counter("loaded_blocks") == 0
            assert list(abandoned) == ["d"]
            assert engine.stats().kv_usage > 0
            there.process.send_signal(signal.SIGCONT)
            for number in range(100):
                if abandoned:
                    here.add(f"later{number}", prompts(number)[1])
                    here.finish(f"later{number}")
            assert there.usage() == here.rest() == 0
            check((there, here), "e", prompts(1)[0], CACHED[0])
    finally:
        there.process.send_signal(signal.SIGCONT)
        there.close()


@pytest.mark.matrix
def test_two_workers_on_each_side(secret, tmp_path):
    model = make_checkpoint(tmp_path, "llama")
    settings = {"tensor_parallel_size": 2, "executor": "process"}
    with open_engine(model, secret, settings) as engine, open_engine(model, secret, settings) as other:
        there, here = Asked(engine), Asked(other)
        there.add("p", prompts()[0], {"do_remote_decode": True}, 1)
        there.finish("p")
        params = there.outputs["p"][-1].kv_transfer
        assert params["tp_size"] == 2
        here.add("d", prompts()[0], params)
        tokens = here.finish("d")
        assert here.num_cached("d") == CACHED[0]
        assert tokens == here.alone(prompts()[0])
        assert here.counter("failed_blocks") == 0
        assert there.rest() == here.rest() == 0
