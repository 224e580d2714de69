"""Running states between two engines, one of which sends them with a prompt's blocks: what travels, is kept, fails."""

from __future__ import annotations

import random
import time

import pytest

from frame.interfaces import RequestView
from frame.plugins.connectors.push import lane as push_lane
from frame.plugins.connectors.push.options import PushOptions
from frame.plugins.connectors.push.prefill_side import Pushes
from frame.testing.connector_states_suite import STATES
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from tests.connectors.push_pairs import Pairs, counter, inbox

ALL = pytest.mark.parametrize("shape", STATES.values(), ids=STATES.keys())


@pytest.fixture
def pairs(tmp_path):
    made = Pairs(tmp_path)
    yield made
    made.close()


def whole(layout, length):
    return (length - 1) // layout.grain * layout.grain


@ALL
def test_the_copy_is_sent_not_the_state_that_the_request_left(pairs, shape):
    """The prefill engine goes on after the prompt, where no window takes blocks, and others get what it gave back."""
    layout = make_layout(**shape)
    there, here = pairs.engine(layout), pairs.engine(layout, max_num_batched_tokens=8)
    arena = there.workers.made[0].transfer.inner._sendings._arena
    kept = arena.take(arena.num_bytes)  # so that nothing is copied before the others have run
    prompts = [pairs.prompt(length, seed=length) for length in (22, 41)]
    for number, prompt in enumerate(prompts):
        pairs.add(there, f"p{number}", prompt, pairs.asks(here), 1 if 6 in shape.get("windows", ()) else 9)
        pairs.finish(there, f"p{number}")
    for number in range(10):
        there.add(request(f"other {number}", pairs.prompt(30, seed=100 + number)))
    pairs.until(lambda: all(there.ended(f"other {number}") for number in range(10)), there)
    arena.give_back(kept)
    for number, prompt in enumerate(prompts):
        assert pairs.decode(here, f"d{number}", prompt) == whole(layout, len(prompt))
    # what was sent stands for its prefix here, too
    here.run(request("again", [*prompts[1], 1, 2, 3]))
    assert here.num_cached("again") == whole(layout, len(prompts[1]))
    pairs.rest(there, here)
    assert counter(there, "unsent_prompts") == 0


@ALL
def test_states_leave_while_the_request_runs(pairs, shape):
    """In the step that ends at the last whole grain, before another overwrites them."""
    layout = make_layout(**shape)
    there, here = pairs.engine(layout, max_num_batched_tokens=8), pairs.engine(layout)
    pairs.add(there, "p", pairs.prompt(41), pairs.asks(here), 1)
    prompts, number = inbox(here)._prompts, there.workers.made[0].transfer.hooks.numbers["state"]
    pairs.until(lambda: any(one.there[number].all() for one in list(prompts.values())) or there.ended("p"), there)
    assert not there.ended("p") or there.busy
    sending = there.workers.made[0].transfer.inner._sendings._sendings["p"]
    assert sending.staged[number].all()
    assert sending.blocks is None
    assert pairs.decode(here, "d", pairs.prompt(41)) == 40
    pairs.rest(there, here)


@ALL
def test_found_states_travel_and_those_that_are_here_do_not_matter(pairs, shape):
    layout = make_layout(**shape)
    there, here = pairs.engine(layout), pairs.engine(layout)
    there.run(request("before", pairs.prompt(30)))
    here.run(request("before", pairs.prompt(18)))
    params = pairs.prefill(there, here, "p", pairs.prompt(41))
    assert there.num_cached("p") == whole(layout, 30)
    assert pairs.decode(here, "d", pairs.prompt(41), params) == 40
    # of the same prompt once more, with a state that was found behind all of its grains
    params = pairs.prefill(there, here, "again", pairs.prompt(41))
    assert there.num_cached("again") == 40
    pairs.arrived(here, there)  # what comes after its request has gone stays until it expires
    assert pairs.decode(here, "again", pairs.prompt(41), params) == 40
    pairs.rest(there, here)
    pairs.until(lambda: inbox(here).arena.used_bytes == 0, here)


def test_two_ranks_each_send_their_own(pairs):
    layout = make_layout(ranks=2, **STATES["states"])
    there, here = pairs.engine(layout, ranks=2), pairs.engine(layout, ranks=2, late=3)
    for number, length in enumerate((22, 41)):
        prompt = pairs.prompt(length, seed=number)
        params = pairs.prefill(there, here, f"p{number}", prompt)
        assert pairs.decode(here, f"d{number}", prompt, params) == whole(layout, length)
    pairs.rest(there, here)


@pytest.mark.parametrize("first", ["p", "d"])
@ALL
def test_where_no_copy_was_kept_nobody_waits(pairs, shape, first):
    """The prompt is computed in one step, which leaves a state behind all of it."""
    layout = make_layout(**shape)
    there, here = pairs.engine(layout, enable_chunked_prefill=False), pairs.engine(layout)
    prompt = pairs.prompt(22)
    if first == "p":
        assert pairs.prefill(there, here, "p", prompt) is None
    else:
        pairs.add(here, "d", prompt, {"do_remote_prefill": True})
        for _ in range(3):
            here.step()
        pairs.add(there, "p", prompt, pairs.asks(here), 1)
        pairs.until(lambda: there.ended("p") and here.ended("d"), there, here)
    assert here.num_cached("d") == 0 if first == "d" else pairs.decode(here, "d", prompt, {}) == 0
    pairs.rest(there, here)
    pairs.until(lambda: inbox(here).take() is not None and inbox(here).arena.used_bytes == 0)


def test_who_waits_is_told_of_a_prompt_that_was_not_followed(pairs):
    """As of one that may not use what is cached, which is computed in one step here."""
    layout = make_layout(**STATES["states"])
    there, here = pairs.engine(layout, enable_chunked_prefill=False), pairs.engine(layout)
    pairs.add(here, "d", pairs.prompt(22), {"do_remote_prefill": True})
    one = request("p", pairs.prompt(22), 1, prompt_logprobs=1)
    one.kv_transfer = pairs.asks(here)
    there.add(one)
    pairs.until(lambda: here.ended("d"), there, here)
    assert there.outputs["p"][-1].kv_transfer is None
    assert here.num_cached("d") == 0
    pairs.rest(there, here)


@ALL
def test_a_state_that_was_changed_on_its_way_costs_the_computation(pairs, shape, monkeypatch):
    layout = make_layout(**shape)
    there, here = pairs.engine(layout), pairs.engine(layout)
    numbers = there.workers.made[0].transfer.hooks.numbers
    part = push_lane.Part

    def changed(digest, layer, first, count, checksum):
        return part(digest, layer, first, count, checksum ^ (layer == numbers["state"]))

    monkeypatch.setattr(push_lane, "Part", changed)
    params = pairs.prefill(there, here, "p", pairs.prompt(41))
    assert pairs.decode(here, "d", pairs.prompt(41), params) == 0
    pairs.rest(there, here)
    pairs.until(lambda: inbox(here).arena.used_bytes == 0)


@ALL
def test_a_state_that_went_when_it_was_to_be_loaded_is_computed(pairs, shape):
    """The request has a part of the prompt, whose state it does not go on from."""
    layout = make_layout(**shape)
    there, here = pairs.engine(layout), pairs.engine(layout)
    here.run(request("before", pairs.prompt(18)))
    pairs.prefill(there, here, "p", pairs.prompt(41))
    claim = inbox(here).claim
    inbox(here).claim = lambda digest: inbox(here).forget() or claim(digest)
    pairs.decode(here, "d", pairs.prompt(41))
    pairs.rest(there, here)
    assert counter(here, "failed_blocks") > 0
    assert counter(here, "loaded_blocks") == 0


def test_no_more_than_half_of_the_states_are_kept(pairs):
    layout = make_layout(**STATES["states alone"])
    there, here = pairs.engine(layout), pairs.engine(layout)
    arena = there.workers.made[0].transfer.inner._sendings._arena
    kept = arena.take(arena.num_bytes)
    held = [pairs.prefill(there, here, f"p{number}", pairs.prompt(22, seed=number)) is not None for number in range(9)]
    assert held == [True] * 6 + [False] * 3
    there.run(request("later", pairs.prompt(4)), until=lambda: there.ended("later"))
    assert there.engine.stats().connector_gauges["push_held_blocks"] == 6
    arena.give_back(kept)
    pairs.rest(there, here)
    for number in range(6):
        assert pairs.decode(here, f"d{number}", pairs.prompt(22, seed=number)) == 20
    pairs.rest(there, here)


def test_no_memory_for_sending_ends_with_the_deadline(pairs):
    layout = make_layout(**STATES["states alone"])
    there, here = pairs.engine(layout, options={"expiry_seconds": 1}), pairs.engine(layout)
    arena = there.workers.made[0].transfer.inner._sendings._arena
    kept = arena.take(arena.num_bytes)
    params = pairs.prefill(there, here, "p", pairs.prompt(41))
    assert there.busy
    pairs.until(lambda: not there.busy, there)
    arena.give_back(kept)
    assert pairs.decode(here, "d", pairs.prompt(41), params) == 0
    assert pairs.unsent(there) == 1
    pairs.rest(there, here)


@ALL
def test_more_than_the_memory_is_refused_and_computed(pairs, shape):
    layout = make_layout(**shape)
    there, here = pairs.engine(layout), pairs.engine(layout)
    held = inbox(here).arena.take(inbox(here).arena.num_bytes)
    params = pairs.prefill(there, here, "p", pairs.prompt(41))
    assert pairs.decode(here, "d", pairs.prompt(41), params) == 0
    pairs.rest(there, here)
    inbox(here).arena.give_back(held)


@pytest.mark.some(5)
@pytest.mark.parametrize("aborts", ["p", "d"])
@pytest.mark.parametrize("steps", [2, 5, *(pytest.param(steps, marks=pytest.mark.matrix) for steps in (0, 3, 9))])
@ALL
def test_aborts_give_everything_back(pairs, shape, steps, aborts):
    layout = make_layout(**shape)
    there = pairs.engine(layout, max_num_batched_tokens=9)
    here = pairs.engine(layout, options={"wait_seconds": 0.1, "expiry_seconds": 1})
    prompt = pairs.prompt(41)
    pairs.add(here, "d", prompt, {"do_remote_prefill": True})
    pairs.add(here, "stays", pairs.prompt(30, seed=4), None)
    pairs.add(there, "p", prompt, pairs.asks(here), 1)
    for _ in range(steps):
        there.step()
        here.step()
        time.sleep(0.001)
    (there if aborts == "p" else here).engine.abort([aborts])
    pairs.until(lambda: not (there.busy or here.busy), there, here)
    here.check("stays", *("d" if aborts == "p" else ""))
    assert there.engine.stats().kv_usage == here.engine.stats().kv_usage == 0
    pairs.until(lambda: inbox(here).take() is not None and inbox(here).arena.used_bytes == 0)


@pytest.mark.some(3)
@pytest.mark.parametrize("broken", [1, 2, 4, *(pytest.param(step, marks=pytest.mark.matrix) for step in (3, 5, 6, 7))])
@ALL
def test_a_step_that_fails_where_it_is_computed_sends_nothing_wrong(pairs, shape, broken):
    layout = make_layout(**shape)
    there = pairs.engine(layout, broken_steps=[broken], max_num_batched_tokens=8)
    here = pairs.engine(layout, options={"wait_seconds": 0.2})
    for number in range(3):
        pairs.add(there, f"p{number}", pairs.prompt(30, seed=number % 2), pairs.asks(here), 1)
        there.step()
    pairs.until(lambda: not there.busy, there)
    for number in range(3):
        pairs.decode(here, f"d{number}", pairs.prompt(30, seed=number % 2))
    pairs.rest(here)


def test_who_is_preempted_where_it_is_computed_sends_all_once_more(pairs):
    """Its pool is too small for all that run, so that prompts are left in the middle, or behind their last grain."""
    shape = STATES["states beside windows"]
    small, layout = make_layout(**{**shape, "num_blocks": 30}), make_layout(**shape)
    there, here = pairs.engine(small, max_num_batched_tokens=8), pairs.engine(layout, options={"wait_seconds": 0.3})
    for number in range(12):
        there.add(request(f"other {number}", pairs.prompt(10, seed=50 + number), 30))
        pairs.add(there, f"p{number}", pairs.prompt(41, seed=number), pairs.asks(here), 1)
    pairs.until(lambda: not there.busy, there)
    there.check()
    assert there.engine.stats().preemptions > 8
    (lane,) = there.workers.made[0].transfer.inner._lanes._lanes.values()
    pairs.until(lambda: lane.idle)
    found = [pairs.decode(here, f"d{number}", pairs.prompt(41, seed=number)) for number in range(12)]
    assert sum(found) > 200
    pairs.rest(there, here)


@ALL
def test_sleep_and_reset(pairs, shape):
    layout = make_layout(**shape)
    there, here = pairs.engine(layout, max_num_batched_tokens=8), pairs.engine(layout, options={"wait_seconds": 0.3})
    for number, engine in enumerate((there, here)):
        pairs.prefill(there, here, f"p{number}", pairs.prompt(41, seed=number))
        pairs.rest(there)
        engine.engine.call("sleep")
        engine.engine.call("wake_up")
        assert pairs.decode(here, f"d{number}", pairs.prompt(41, seed=number)) == 40
    pairs.prefill(there, here, "reset", pairs.prompt(41, seed=3))
    pairs.rest(there, here)
    here.run(request("other", pairs.prompt(8, seed=4)))
    assert here.engine.call("reset_prefix_cache", {"reset_connector": True})
    assert pairs.decode(here, "reset", pairs.prompt(41, seed=3)) == 0
    pairs.until(lambda: inbox(here).arena.used_bytes == 0)
    pairs.rest(there, here)


def test_memory_that_goes_takes_along_what_was_not_sent(pairs):
    """The copy of the state waits for room when the memory of the cache goes."""
    layout = make_layout(**STATES["states"])
    there, here = pairs.engine(layout), pairs.engine(layout)
    arena = there.workers.made[0].transfer.inner._sendings._arena
    kept = arena.take(arena.num_bytes)
    params = pairs.prefill(there, here, "p", pairs.prompt(41))
    for _ in range(3):
        there.step()  # the worker hears of the end
    there.workers.made[0].call("sleep")
    there.workers.made[0].call("wake_up", {"tags": ["kv_cache"]})
    arena.give_back(kept)
    pairs.until(lambda: not there.busy, there)
    assert pairs.decode(here, "d", pairs.prompt(41), params) == 0
    pairs.rest(there, here)


@pytest.mark.parametrize(
    ("change", "cached"), [({"block_size": 8}, 0), ({"ranks": 2}, 0), ({"states": 2, "checkpoints": 20}, 40)], ids=str
)
def test_engines_of_other_blocks_or_ranks_compute(pairs, change, cached):
    """How many states there are does not matter."""
    first, second = (make_layout(**{**STATES["states"], **more}) for more in ({}, change))
    there = pairs.engine(first)
    here = pairs.engine(second, ranks=change.get("ranks", 1), options={"wait_seconds": 0.3})
    params = pairs.prefill(there, here, "p", pairs.prompt(41))
    assert pairs.decode(here, "d", pairs.prompt(41), params) == cached
    pairs.rest(there, here)


@pytest.mark.parametrize("shape", [{}, STATES["states"]], ids=["tokens", "states"])
def test_a_request_that_ends_without_blocks_is_not_sent(shape):
    """As one that was preempted when its last token was on its way."""
    layout = make_layout(**shape)
    sends = Pushes(layout, PushOptions(decode="127.0.0.1:1"), "127.0.0.1")
    view = RequestView("a", list(range(10)), [], 10, params={"do_remote_decode": True}, finish_reason="length")
    assert not sends.finished(view, [[] for _ in layout.groups])
    assert sends.num_held == 0
    assert not sends._ends


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 30))])
def test_random_lives(pairs, seed):
    """Prompts through two prefill engines and a small decode engine, with preemptions, aborts and broken steps."""
    draw = random.Random(seed)
    windows = draw.choice([(), (0,), (0, 6)])
    layout = make_layout(40 * max(1, len(windows)), windows=windows, states=4, checkpoints=draw.choice([3, 8]))
    here = pairs.random_life(draw, layout, (9, 64))
    assert counter(here, "loaded_blocks") > 0
