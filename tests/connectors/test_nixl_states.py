"""Running states between two engines over fake workers, with real agents: what is handed over, kept and refused."""

from __future__ import annotations

import pytest

from frame.plugins.connectors.nixl import worker as nixl_worker
from frame.plugins.connectors.nixl.holds import Holds
from frame.plugins.connectors.nixl.messages import digest
from frame.testing.connector_states_suite import STATES
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from tests.connectors.nixl_pairs import Pairs, counter

pytest.importorskip("nixl")


@pytest.fixture
def pairs(tmp_path):
    made = Pairs(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize("shape", STATES.values(), ids=STATES.keys())
def test_states_pass_through_host_buffers(pairs, shape):
    layout, options = make_layout(**shape), {"host_buffer": True}
    there, here = (pairs.engine(layout, options=options) for _ in range(2))
    prompt = pairs.prompt(41)
    params = pairs.prefill(there, "p", prompt)
    pairs.add(here, "d", prompt, params)
    pairs.until(lambda: here.ended("d"), there, here)
    assert here.num_cached("d") == 40
    pairs.rest(there, here)


@pytest.mark.parametrize("shape", STATES.values(), ids=STATES.keys())
def test_the_copy_is_held_not_the_state_that_the_request_left(pairs, shape):
    """The prefill engine goes on, with others in the blocks that it gave back, before the decode engine reads."""
    layout = make_layout(**shape)
    there, here = pairs.engine(layout), pairs.engine(layout, max_num_batched_tokens=8)
    prompts = [pairs.prompt(length, seed=length) for length in (22, 41)]
    params = [pairs.prefill(there, f"p{number}", prompt) for number, prompt in enumerate(prompts)]
    for number in range(10):
        there.add(request(f"other {number}", pairs.prompt(30, seed=100 + number)))
    pairs.until(lambda: all(there.ended(f"other {number}") for number in range(10)), there)
    for number, prompt in enumerate(prompts):
        last = (len(prompt) - 1) // layout.grain * layout.grain
        assert pairs.decode(here, f"d{number}", prompt, params[number]) == last
    # what was handed over stands for its prefix here, too
    here.run(request("again", [*prompts[1], 1, 2, 3]))
    assert here.num_cached("again") == (len(prompts[1]) - 1) // layout.grain * layout.grain
    pairs.rest(there, here)


@pytest.mark.parametrize("shape", STATES.values(), ids=STATES.keys())
def test_a_state_that_does_not_arrive_is_computed(pairs, shape, monkeypatch):
    layout = make_layout(**shape)
    there, here = pairs.engine(layout), pairs.engine(layout)
    prompt = pairs.prompt(41)
    here.run(request("before", prompt[:18]))
    params = pairs.prefill(there, "p", prompt)
    monkeypatch.setattr(nixl_worker, "_covers", lambda *given: False)
    pairs.decode(here, "d", prompt, params)
    assert counter(here, "failed_blocks") > 0
    pairs.rest(there, here)


def test_without_a_copy_nothing_is_held(pairs):
    """The prompt is computed in one step, which leaves a state behind all of it."""
    layout = make_layout(**STATES["states"])
    there, here = pairs.engine(layout, enable_chunked_prefill=False), pairs.engine(layout)
    prompt = pairs.prompt(22)
    assert pairs.prefill(there, "p", prompt) is None
    assert pairs.decode(here, "d", prompt, None) == 0
    pairs.rest(there, here)


def test_no_more_than_half_of_the_states_are_held(pairs):
    layout = make_layout(**STATES["states alone"])
    there = pairs.engine(layout)
    held = [pairs.prefill(there, f"p{number}", pairs.prompt(22, seed=number)) is not None for number in range(9)]
    assert held == [True] * 6 + [False] * 3
    assert there.engine.scheduler._transfers.connector.reset()
    pairs.rest(there)


def test_a_state_is_given_to_those_alone_whose_tokens_it_stands_for():
    layout, tokens = make_layout(**STATES["states"]), list(range(21))
    holds = Holds(layout, 10.0, 100, max_states=4)
    assert holds.add("a", b"", tokens, [[1, 2, 3, 4, 5, 6], [7]])
    assert holds.num_blocks == 7
    for count in (4, 16, 21):
        assert holds.lease("a", count, digest(b"", tokens[:count])) is None
    assert holds.lease("a", 20, digest(b"", tokens[:20]))[1] == [[1, 2, 3, 4, 5], [7]]


@pytest.mark.parametrize(
    ("change", "cached"), [({"block_size": 8}, 0), ({"ranks": 2}, 40), ({"states": 2, "checkpoints": 20}, 40)], ids=str
)
def test_engines_of_other_blocks_compute_what_has_states(pairs, change, cached):
    """As states stand for multiples of a block; how many there are, and on how many ranks, does not matter."""
    first, second = (make_layout(**{**STATES["states"], **more}) for more in ({}, change))
    there, here = pairs.engine(first), pairs.engine(second, ranks=change.get("ranks", 1))
    prompt = pairs.prompt(41)
    params = pairs.prefill(there, "p", prompt)
    assert pairs.decode(here, "d", prompt, params) == cached
    # what nobody reads need not be held for as long as a lease
    assert cached or there.engine.scheduler._transfers.connector.reset()
    pairs.rest(there, here)
