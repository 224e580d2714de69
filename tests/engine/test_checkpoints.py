"""Copies of states that stand for prefixes, without requests that compute."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frame.core.engine.cache.checkpoints import Checkpoints
from frame.interfaces import KVGroup, KVLayout, SamplingParams, StateKV
from tests.engine.fake_connector import FakeConnector
from tests.engine.simulation import Simulation, make_layout, make_request

INTERVAL = 16


def make_checkpoints() -> Checkpoints:
    group = KVGroup(specs=(StateKV(state_bytes=8),), layers=("a",), block_size=INTERVAL)
    return Checkpoints(KVLayout(groups=(group,), pools=(12,), block_size=INTERVAL, grain=INTERVAL), enabled=True)


def admitted(checkpoints: Checkpoints) -> Any:
    """What a request with a state has, as far as checkpoints ask."""
    return SimpleNamespace(cache=SimpleNamespace(blocks=[[checkpoints.admit([])[0]]], hashes=[]))


@pytest.mark.parametrize("ended", [(0,), (1,), (0, 1)])
def test_a_state_is_kept_under_its_own_prefix_though_its_request_ends_before(ended: tuple[int, ...]) -> None:
    checkpoints = make_checkpoints()
    pool, requests = checkpoints.pools[0], [admitted(checkpoints), admitted(checkpoints)]
    states = {request.cache.blocks[0][0]: name for request, name in zip(requests, ("first", "second"), strict=True)}
    free = pool.num_free
    checkpoints.note(requests[0], b"first", INTERVAL)
    checkpoints.note(requests[1], b"second", INTERVAL)
    for place in ended:
        checkpoints.end(requests[place])
        pool.release(requests[place].cache.blocks[0])
    checkpoints.save()
    for copy in checkpoints.take()[0]:
        states[int(copy.targets[0])] = states[int(copy.sources[0])]
    assert [states[pool.find(0, name)] for name in (b"first", b"second")] == ["first", "second"]
    assert pool.num_free == free + len(ended)


def test_what_a_failed_step_left_is_kept_neither_in_copies_nor_in_ended_requests() -> None:
    checkpoints = make_checkpoints()
    pool, running, ended = checkpoints.pools[0], admitted(checkpoints), admitted(checkpoints)
    checkpoints.note(running, b"running", INTERVAL)
    checkpoints.note(ended, b"ended", INTERVAL)
    checkpoints.end(ended)
    pool.release(ended.cache.blocks[0])
    assert pool.find(0, b"ended")
    checkpoints.drop()
    checkpoints.save()
    assert checkpoints.take() == ([], [])
    assert not pool.find(0, b"ended")
    assert not pool.find(0, b"running")


def test_a_state_that_followed_from_a_load_is_found_once_the_load_is_known_to_have_succeeded() -> None:
    """One state does not arrive, while another request computes the same tokens: a third finds the blocks of that."""
    layout, tokens = make_layout(40, states=4, checkpoints=8), [*range(1, 11)] * 2
    connector = FakeConnector(layout=layout, failing=[0])
    simulation = Simulation(layout=layout, connector=connector, max_in_flight=2)
    first = make_request("first", tokens[:9], 1)
    simulation.add(first)
    simulation.run()
    assert simulation.scheduler.reset_prefix_cache()
    whole = {"params": SamplingParams(max_tokens=3, prompt_logprobs=0)}  # it is computed, not found
    loads, computes = make_request("loads", tokens, 3), make_request("computes", tokens, 3, **whole)
    finds = make_request("finds", [*tokens, 3, 2, 1], 3)
    simulation.add(loads)
    simulation.add(computes)
    simulation.launch()
    assert connector.told[-1] == ("loads", 8)
    simulation.add(finds)
    simulation.launch()
    simulation.run()
    for request in (loads, computes, finds):
        simulation.check(request)
