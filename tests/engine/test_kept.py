"""What a session's requests leave to those that follow them."""

from __future__ import annotations

import pytest

from frame.core.interfaces.sampling import SamplingParams, StructuredOutputsParams
from frame.plugins.schedulers.fair import FairPolicy
from tests.engine.fake_connector import FakeConnector
from tests.engine.simulation import Simulation, make_layout, make_request


def simulate(num_blocks: int = 33, **settings) -> Simulation:
    layout = make_layout(num_blocks, 4, states=settings.pop("states", 0))
    connector = FakeConnector(layout=layout) if settings.pop("connected", False) else None
    return Simulation(layout=layout, connector=connector, **{"enable_prefix_caching": False, **settings})


def answer(sim: Simulation, request) -> list[int]:
    """Runs a request to its end, leaving what is kept; checks and returns its output."""
    sim.add(request)
    while sim.step():
        pass
    sim.check(request)
    return sim.tokens(request.request_id)


def kept(sim: Simulation) -> list[str]:
    return list(sim.scheduler.lifecycle.kept._requests)


def follow(sim: Simulation, *, before: str = "", tokens=(), piece=(5, 6, 7), name: str = "b", **fields):
    """The request that follows `before`; the tokens that it computed, and what it found."""
    request = make_request(name, [*tokens, *piece], 5, follows=before, **fields)
    first = len(sim.plans)
    output = answer(sim, request)
    computed = sum(plan.num_tokens for plan in sim.plans[first:])
    return computed, sim.outputs[name][0].num_cached, output


@pytest.mark.parametrize("in_flight", [1, 2, 3])
@pytest.mark.parametrize("stop", [False, True])
def test_nothing_that_was_computed_is_computed_again(in_flight, stop):
    sim = simulate(max_in_flight=in_flight)
    output = answer(sim, make_request("plain", [1, 2, 3, 4, 5], 6))
    params = SamplingParams(max_tokens=6, stop_token_ids=[output[3]]) if stop else None
    before = answer(sim, make_request("a", [1, 2, 3, 4, 5], 6, params=params, follows=""))
    assert kept(sim) == ["a"]
    tokens = [1, 2, 3, 4, 5, *before[:-1]]
    computed, found, _ = follow(sim, before="a", tokens=tokens)
    assert found == len(tokens)
    assert computed == 3 + 4  # the piece, and all tokens of the answer but the last
    assert kept(sim) == ["b"]
    assert sim.scheduler.lifecycle.kept.drop("b")
    sim.check_quiet()


def test_a_plain_request_leaves_nothing():
    sim = simulate()
    answer(sim, make_request("a", [1, 2, 3], 4))
    sim.check_quiet()


def test_a_later_session_of_the_same_name_frees_what_the_earlier_one_left():
    sim = simulate()
    for _ in range(2):
        answer(sim, make_request("a", [1, 2, 3, 4, 5], 6, follows=""))
    assert sim.scheduler.lifecycle.kept.drop("a")
    sim.check_quiet()


@pytest.mark.parametrize("setting", [{"states": 4}, {"connected": True}])
def test_nothing_is_kept_of_states_and_for_connectors(setting):
    sim = simulate(**setting)
    answer(sim, make_request("a", [1, 2, 3], 4, follows=""))
    assert kept(sim) == []
    sim.check_quiet()


@pytest.mark.parametrize(
    "fields", [{"salt": "other"}, {"tokens": [1, 2, 9]}, {"tokens": [1, 2], "piece": [3]}], ids=["salt", "ids", "short"]
)
def test_what_does_not_go_on_from_it_takes_nothing(fields):
    sim = simulate()
    before = answer(sim, make_request("a", [1, 2, 3], 4, follows=""))
    fields = {"tokens": [1, 2, 3, *before[:-1]], **fields}
    _, found, _ = follow(sim, before="a", **fields)
    assert found == 0
    assert kept(sim) == ["b"]  # and what "a" had left is free
    sim.scheduler.lifecycle.kept.drop()
    sim.check_quiet()


def test_a_request_that_waits_for_its_grammar_holds_no_blocks():
    sim = simulate()
    before = answer(sim, make_request("a", [1, 2, 3], 4, follows=""))
    params = SamplingParams(max_tokens=4, structured_outputs=StructuredOutputsParams(regex="a"))
    sim.scheduler.constraints.submit = lambda request, constraint: None
    sim.add(make_request("b", [1, 2, 3, *before[:-1], 4], 4, params=params, follows="a"))
    assert sim.scheduler._kv.pool.num_free == sim.scheduler._kv.pool.num_blocks - 1


def test_waiting_requests_take_the_blocks_of_the_session_that_waited_longest():
    sim = simulate(num_blocks=13)  # 48 tokens
    for name in ("a", "b", "c"):
        answer(sim, make_request(name, [1, 2, 3, 4, 5, 6, 7], 5, follows=""))
    assert kept(sim) == ["a", "b", "c"]
    answer(sim, make_request("plain", [3] * 20, 2))
    assert kept(sim) == ["b", "c"]
    running = make_request("grows", [3], 40)
    answer(sim, running)  # a running one takes them too, before it is preempted
    assert kept(sim) == []
    assert sim.scheduler.lifecycle.num_preemptions == 0
    sim.check_quiet()


def test_a_piece_that_waits_in_the_queue_gives_way_to_what_runs():
    sim = simulate(num_blocks=9, max_num_seqs=1)  # 32 tokens
    before = answer(sim, make_request("a", [1, 2, 3, 4, 5, 6, 7], 5, follows=""))
    running, tokens = make_request("grows", [3], 31), [1, 2, 3, 4, 5, 6, 7, *before[:-1]]
    sim.add(running)
    sim.step()
    piece = make_request("b", [*tokens, 8], 2, follows="a")
    sim.add(piece)
    sim.run()
    sim.check(running)
    sim.check(piece)
    assert sim.scheduler.lifecycle.num_preemptions == 0


def test_a_full_queue_takes_the_pieces_of_sessions_that_it_let_in():
    sim = simulate(max_num_seqs=1, max_queue=1)
    before = answer(sim, make_request("a", [1, 2, 3], 4, follows=""))
    for name in ("x", "y"):
        sim.add(make_request(name, [4], 4))
        sim.launch()
    sim.add(make_request("b", [1, 2, 3, *before[:-1], 9], 4, follows="a"))
    sim.run()


def test_a_cleared_cache_keeps_nothing():
    sim = simulate()
    before = answer(sim, make_request("a", [1, 2, 3], 4, follows=""))
    assert sim.scheduler.reset_prefix_cache()
    assert kept(sim) == []
    _, found, _ = follow(sim, before="a", tokens=[1, 2, 3, *before[:-1]])
    assert found == 0


@pytest.mark.parametrize("length", [16, 17, 18])
def test_a_window_that_went_on_with_steps_behind_the_end_is_not_kept(length):
    """Steps in flight behind a stop token need less of a window than the next piece."""
    sim = Simulation(layout=make_layout(65, 4, (5,)), max_in_flight=3, enable_prefix_caching=False)
    prompt = [1 + place % 9 for place in range(length)]
    output = answer(sim, make_request("plain", prompt, 9))
    params = SamplingParams(max_tokens=9, stop_token_ids=[next(one for one in output if output.index(one) > 1)])
    before = answer(sim, make_request("a", prompt, 9, params=params, follows=""))
    answer(sim, make_request("b", [*prompt, *before[:-1], 5, 6, 7], 4, follows="a"))


@pytest.mark.parametrize("follows", [None, ""], ids=["nothing kept", "kept"])
def test_no_more_requests_give_way_because_of_what_sessions_hold(follows):
    layout = make_layout(41)
    sim = Simulation(layout=layout, policy=FairPolicy, max_num_seqs=5, max_in_flight=1, enable_prefix_caching=False)
    for number in range(4):
        answer(sim, make_request(f"s{number}", [1] * 24, 4, follows=follows))
    many = [make_request(f"a{number}", [5, 6, number], 40, owner="a") for number in range(5)]
    for one in many:
        sim.add(one)
    for _ in range(5):
        sim.step()
    other = make_request("b", [3] * 30, 4, owner="b")
    sim.add(other)
    while not sim.outputs["b"]:
        sim.step()
    assert sim.scheduler.lifecycle.num_preemptions == 1
    sim.run()
    for one in [*many, other]:
        sim.check(one)
