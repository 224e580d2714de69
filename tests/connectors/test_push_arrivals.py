"""What a decode engine does with what its workers tell of prompts that are sent to it."""

from __future__ import annotations

import pytest

from frame.interfaces import RequestView
from frame.plugins.connectors.nixl.messages import digest
from frame.plugins.connectors.push.decode_side import Arrivals
from frame.plugins.connectors.push.messages import PushStep
from frame.testing.fake_cache import make_layout

LAYOUT = make_layout()
TOKENS = list(range(10))
DIGEST = digest(b"", TOKENS[:9])


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def arrivals(clock):
    return Arrivals(LAYOUT, 2, 10.0, clock)


def view(name="a", **params):
    return RequestView(name, TOKENS, [], 10, params={"do_remote_prefill": True, **params})


def test_a_prompt_is_there_when_all_ranks_have_it(arrivals):
    assert arrivals.match(view(), 0) == (None, False)
    arrivals.told(0, {DIGEST: "arrived"})
    assert arrivals.match(view(), 0) == (None, False)
    arrivals.told(1, {DIGEST: "begun"})
    assert arrivals.match(view(), 0) == (None, False)
    arrivals.told(1, {DIGEST: "arrived"})
    assert arrivals.match(view(), 0) == (9, True)
    assert arrivals.match(view(), 4) == (5, True)
    assert arrivals.match(view(), 8) == (0, False)
    assert arrivals.match(RequestView("b", [*TOKENS, 7], [], 10, params={"do_remote_prefill": True}), 4) == (4, True)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("other", ["begun", "arrived"])
def test_what_one_rank_lacks_nobody_waits_for(arrivals, first, other):
    states = {first: "gone", 1 - first: other}
    for rank, state in states.items():
        arrivals.told(rank, {DIGEST: state})
    assert arrivals.match(view(), 0) == (0, False)
    arrivals.told(first, {DIGEST: "begun"})  # it is sent once more
    arrivals.told(0, {DIGEST: "arrived"})
    arrivals.told(1, {DIGEST: "arrived"})
    assert arrivals.match(view("b"), 0) == (9, True)


def test_a_request_waits_as_long_as_it_was_told(arrivals, clock):
    assert arrivals.match(view(), 0) == (None, False)
    assert arrivals.match(view("sent", transfer_mode="push"), 0) == (None, False)
    clock.now = 2.5
    assert arrivals.match(view("sent", transfer_mode="push"), 0) == (0, False)
    clock.now = 9
    assert arrivals.match(view(), 0) == (None, False)
    clock.now = 11
    assert arrivals.match(view(), 0) == (0, False)


def test_a_second_request_waits_for_the_load_of_the_first(arrivals):
    for rank in (0, 1):
        arrivals.told(rank, {DIGEST: "arrived"})
    arrivals.match(view(), 0)
    arrivals.allocated(view(), [[1, 2, 3]], 9)
    assert arrivals.match(view("b"), 0) == (None, False)
    step = PushStep()
    arrivals.fill(step)
    assert [(load.owner, load.places, load.blocks) for load in step.loads] == [("a", [[0, 1, 2]], [[1, 2, 3]])]
    assert not step.loading
    assert not arrivals.reset()
    later = PushStep()
    arrivals.fill(later)
    assert later.loading == ["a"]
    arrivals.received(["a"])
    assert arrivals.match(view("b"), 0) == (0, False)  # it is in the cache, or was not worth its while
    assert arrivals.reset()


def test_what_nobody_needs_is_forgotten(arrivals):
    for rank in (0, 1):
        arrivals.told(rank, {DIGEST: "arrived"})
    for name in ("a", "b"):
        arrivals.match(view(name), 0)
    arrivals.finished(view())
    step = PushStep()
    arrivals.fill(step)
    assert step.forget == []
    arrivals.finished(view("b"))
    arrivals.fill(step)
    assert step.forget == [DIGEST]


def test_what_is_known_is_bounded(arrivals):
    for number in range(10_000):
        arrivals.told(0, {number.to_bytes(32, "little"): "gone"})
    assert len(arrivals._states) == 8192
    assert len(arrivals._past) == 1024
