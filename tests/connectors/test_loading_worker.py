"""Loads beside the steps: what becomes of them when the KV memory goes away."""

from __future__ import annotations

import threading

import pytest

from frame.plugins.connectors.blocks.messages import Move
from frame.testing import ConnectorSuite
from frame.testing.fake_cache import make_layout
from frame.testing.fake_memory import FakeMemory


class Suite(ConnectorSuite):
    __test__ = False
    plugin = "peer"


@pytest.fixture
def worker(tmp_path):
    suite = Suite()
    suite.folder = tmp_path
    made = suite.worker_side(suite.config(kv_connector="peer"), make_layout())
    yield made
    made.close()


def test_what_arrives_when_the_memory_has_gone_away_is_written_nowhere(worker):
    layout, arrives, fetches = make_layout(), threading.Event(), threading.Event()
    worker.register(FakeMemory(layout, 0).views)
    worker.begin_step(b"")

    def fetch(moves, data):
        fetches.set()
        assert arrives.wait(20)
        data[:] = 255
        return list(range(len(moves)))

    worker.begin_load("a", [[Move("a", b"key", [[3] for _ in layout.groups], 0)]], fetch)
    assert fetches.wait(20)
    worker.register({})
    memory = FakeMemory(layout, 0)
    before = {name: view.bytes.clone() for name, view in memory.views.items()}
    worker.register(memory.views)
    arrives.set()
    assert worker.end_step([]).received == ["a"]
    for _ in range(50):
        worker.begin_step(b"")
        worker.take_arrived()
        assert not worker.end_step([]).received
    assert all(view.bytes.equal(before[name]) for name, view in memory.views.items())


def test_a_load_for_which_no_thread_can_be_started_ends_without_its_blocks(worker, monkeypatch):
    """The pool has queued it by then, so that another of its threads may run it."""
    layout, submit, given = make_layout(), worker._threads.submit, []
    worker.register(FakeMemory(layout, 0).views)
    worker.begin_step(b"")

    def submits(*arguments):
        given.append(arguments)
        raise RuntimeError("can't start new thread")

    fetched, skipped = [], []
    with monkeypatch.context() as broken:
        broken.setattr(worker._threads, "submit", submits)
        moves = [Move("a", b"key", [[3] for _ in layout.groups], 0)]
        worker.begin_load("a", iter([moves]), lambda *given: fetched.append(given) or [0], skipped.append)
    report = worker.end_step([])
    assert report.received == ["a"]
    assert report.failed_blocks == [(group, 3) for group, _ in enumerate(layout.groups)]
    assert worker.pending_loads() == []
    submit(*given[0]).result(20)
    assert (fetched, skipped) == ([], [moves])


def test_a_name_of_a_load_that_ended_with_the_memory_is_not_kept(worker):
    worker.register(FakeMemory(make_layout(), 0).views)
    arrives = threading.Event()
    worker.begin_step(b"")
    worker.begin_load("a", [[]], lambda moves, data: arrives.wait(20) and [])
    worker.end_step(["a"])
    worker.register({})
    arrives.set()
    assert not worker._gone
