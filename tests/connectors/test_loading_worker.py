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
