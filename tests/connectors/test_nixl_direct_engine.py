"""Engines that read each other's blocks past NIXL, whose agents are real: a stand-in for GPUs maps the memory."""

from __future__ import annotations

import threading
import time

import pytest

from frame.interfaces import Mark
from frame.plugins.connectors.nixl import agent as nixl_agent, worker as nixl_worker
from frame.testing.fake_cache import make_layout
from tests.connectors.direct_memory import FakeSharing
from tests.connectors.nixl_pairs import NEVER, Pairs, counter

pytest.importorskip("nixl")


@pytest.fixture
def pairs(tmp_path):
    made = Pairs(tmp_path)
    yield made
    made.close()


@pytest.fixture
def shared(monkeypatch):
    """The workers' sharing in the order in which their engines are made; NIXL itself may read nothing."""
    made = []

    def make(device):
        made.append(FakeSharing(device))
        return made[-1]

    monkeypatch.setattr(nixl_worker, "sharing_of", make)
    monkeypatch.setattr(nixl_agent, "_descriptors", lambda *given: pytest.fail("a read went through NIXL"))
    return made


@pytest.mark.parametrize("sizes", [(4, 4), (4, 8), (8, 4)], ids=str)
def test_blocks_travel_past_nixl(pairs, shared, sizes):
    there, here = (pairs.engine(make_layout(num_blocks=64, block_size=size)) for size in sizes)
    for number, length in enumerate((22, 40, 17)):
        prompt = pairs.prompt(length, seed=number)
        params = pairs.prefill(there, f"p{number}", prompt)
        assert pairs.decode(here, f"d{number}", prompt, params) > 0
    pairs.rest(there, here)
    assert shared[1].copied > 3
    assert counter(here, "direct_reads") == 3
    assert 0 < counter(here, "direct_seconds") < counter(here, "load_seconds")
    assert shared[0].copied == 0


def test_an_engine_goes_on_before_the_other_side_is_told(pairs, shared, monkeypatch):
    """What NIXL takes to send a notice delays no token."""
    there, here = pairs.engine(), pairs.engine()
    prompt, goes_on, sent = pairs.prompt(40), threading.Event(), []
    params = pairs.prefill(there, "p", prompt)
    tell = nixl_agent.Agent._tell_copied

    def late(agent, read):
        sent.append(goes_on.wait(NEVER))
        tell(agent, read)

    monkeypatch.setattr(nixl_agent.Agent, "_tell_copied", late)
    assert pairs.decode(here, "d", prompt, params) == 39
    goes_on.set()
    pairs.rest(there, here)
    assert sent == [True]


def test_memory_is_given_back_when_an_engine_closes(pairs, shared):
    there, here = pairs.engine(), pairs.engine()
    pairs.decode(here, "d", pairs.prompt(40), pairs.prefill(there, "p", pairs.prompt(40)))
    pairs.rest(there, here)
    assert shared[1].opened.total() > 0
    here.close()
    pairs.made.remove(here)
    assert shared[1].opened.total() == 0


def test_memory_that_nothing_reads_is_given_back_and_mapped_again(pairs, shared, monkeypatch):
    """An engine that sleeps has its memory back only once nobody maps it."""
    monkeypatch.setattr(nixl_agent, "_MAPPED_SECONDS", 0.05)
    there, here = pairs.engine(), pairs.engine()
    for number in range(2):
        prompt = pairs.prompt(40, seed=number)
        assert pairs.decode(here, f"d{number}", prompt, pairs.prefill(there, f"p{number}", prompt)) == 39
        pairs.until(lambda: not shared[1].opened.total())
    assert counter(here, "direct_reads") == 2
    pairs.rest(there, here)


def test_a_copy_that_fails_is_computed_and_the_other_engine_met_anew(pairs, shared):
    there, here = pairs.engine(), pairs.engine()
    pairs.decode(here, "d", pairs.prompt(40), pairs.prefill(there, "p", pairs.prompt(40)))
    shared[1].faults.add("copy")
    pairs.decode(here, "e", pairs.prompt(40, seed=1), pairs.prefill(there, "q", pairs.prompt(40, seed=1)))
    assert counter(here, "failed_blocks") == 10
    assert shared[1].opened.total() == 0
    shared[1].faults.clear()
    assert pairs.decode(here, "f", pairs.prompt(40, seed=2), pairs.prefill(there, "r", pairs.prompt(40, seed=2))) == 39
    pairs.rest(there, here)


def test_a_copy_that_outlasts_its_lease_keeps_the_blocks_and_counts_as_failed(pairs, shared, monkeypatch):
    there, here = pairs.engine(), pairs.engine()
    begun, may_end = threading.Event(), threading.Event()

    class Late(Mark):
        def done(self):
            begun.set()
            return may_end.is_set()

    copy = FakeSharing.copy
    params = pairs.prefill(there, "p", pairs.prompt(40))
    pairs.decode(here, "first", pairs.prompt(40, seed=1), pairs.prefill(there, "q", pairs.prompt(40, seed=1)))
    monkeypatch.setattr(FakeSharing, "copy", lambda self, *given: copy(self, *given) and Late())
    pairs.add(here, "d", pairs.prompt(40), params)
    pairs.until(begun.is_set, here)
    monkeypatch.setattr(nixl_agent, "MARGIN_SECONDS", 2 * NEVER)  # as if the lease had ended
    for _ in range(50):
        assert here.loading == ["d"]
        here.step()
        time.sleep(0.001)
    may_end.set()
    pairs.rest(there, here)
    assert counter(here, "failed_blocks") == 10


def test_an_engine_that_may_not_reads_through_nixl(pairs, monkeypatch):
    made = []
    monkeypatch.setattr(nixl_worker, "sharing_of", lambda device: made.append(FakeSharing(device)) or made[-1])
    there, here = pairs.engine(), pairs.engine(options={"direct": False})
    assert pairs.decode(here, "d", pairs.prompt(40), pairs.prefill(there, "p", pairs.prompt(40))) == 39
    pairs.rest(there, here)
    assert [one.copied for one in made] == [0]
