"""A connector that raises: its help is lost, its loads are computed, and no block stays held for it."""

from __future__ import annotations

import pytest

from frame.transfers import holds
from tests.engine.fake_connector import FakeConnector, FakeTransferWorker
from tests.engine.simulation import Simulation, make_layout, make_request


class ToldWorker(FakeTransferWorker):
    """Sends the blocks of those ended requests of which a message tells it, and of no others."""

    def end_step(self, finished):
        told, self.connector.told_ends = self.connector.told_ends, []
        return super().end_step(told)


class ToldConnector(FakeConnector):
    """Holds blocks until workers have sent them, of which its messages tell them."""

    def __init__(self, **fields):
        super().__init__(hold=True, **fields)
        self.new_ends, self.told_ends = [], []
        self.broken = set()  # methods that raise

    def worker_side(self, layout):
        self.transfer = ToldWorker(self, layout, self.failing)
        return self.transfer

    def check_states(self, request, block_ids):
        """There are none."""

    def allocated(self, *arguments):
        self._raise("allocated")
        super().allocated(*arguments)

    def finished(self, request, block_ids):
        self.new_ends.append(request.request_id)
        return super().finished(request, block_ids)

    def update(self, report):
        self._raise("update")
        return super().update(report)

    def build_message(self, plan):
        self._raise("build_message")
        self.told_ends += self.new_ends
        self.new_ends = []
        return super().build_message(plan)

    def _raise(self, method):
        if method in self.broken:
            raise KeyError("a bug")


@pytest.fixture
def clock(monkeypatch):
    """Seconds that pass only when a test says so."""
    now = [0.0]
    monkeypatch.setattr(holds.time, "monotonic", lambda: now[0])
    return now


def simulation():
    connector = ToldConnector(layout=make_layout(60))
    return Simulation(layout=make_layout(60), connector=connector), connector


def drain(sim, steps=200):
    for _ in range(steps):
        if not sim.step():
            return


def test_what_a_sound_connector_holds_stays_held(clock):
    sim, connector = simulation()
    sim.add(make_request("a", list(range(13))))
    while sim.scheduler.lifecycle.requests:
        sim.step()
    clock[0] += 10 * holds.MAX_SECONDS
    connector.told_ends, connector.new_ends = [], []
    drain(sim, 20)
    assert list(sim.scheduler.lifecycle.held) == ["a"]


@pytest.mark.parametrize("method", ["build_message", "allocated"])
def test_no_block_stays_held_for_a_connector_whose_workers_hear_nothing_more(method, clock, caplog):
    sim, connector = simulation()
    first = make_request("a", list(range(13)))
    sim.add(first)
    sim.step()
    connector.broken = {method}
    later = [make_request(name, [ord(name)] * 13) for name in "bc"]
    for request in later:
        sim.add(request)
    drain(sim)
    clock[0] += holds.MAX_SECONDS - 1
    drain(sim, 20)
    assert set(sim.scheduler.lifecycle.held) <= {"a", "b", "c"}, "workers may read blocks of which they heard before"
    last = make_request("d", [5] * 13)
    sim.add(last)
    drain(sim, 40)
    assert "d" not in sim.scheduler.lifecycle.held, "no worker has heard of it"
    assert "d" not in connector.ended, "nor the connector, which could offer its blocks to others"
    assert sim.outputs["d"][-1].kv_transfer is None
    clock[0] += 2
    sim.run()
    for request in (first, *later, last):
        sim.check(request)
    assert "are given back" in caplog.text


def test_blocks_go_back_where_a_connector_failed_to_hear_that_they_were_read(clock):
    sim, connector = simulation()
    connector.broken = {"update"}
    connector.new_ends = connector.told_ends = None
    connector.build_message = lambda plan: b""
    connector.finished = lambda request, block_ids: (True, None)
    connector.transfer.end_step = lambda finished: FakeTransferWorker.end_step(connector.transfer, [])
    request = make_request("a", list(range(13)))
    sim.add(request)
    drain(sim, 40)
    assert list(sim.scheduler.lifecycle.held) == ["a"]
    clock[0] += holds.MAX_SECONDS + 1
    sim.run()
    sim.check(request)


@pytest.mark.parametrize("later", [False, True])
def test_a_load_that_was_agreed_before_the_connector_failed_in_the_same_step_is_computed(later):
    """The step has no message then, so no worker hears of the load."""
    layout = make_layout(60)
    connector = FakeConnector(layout=layout, later=later)
    sim = Simulation(layout=layout, connector=connector)
    for request in (make_request("a", list(range(13))), make_request("b", [7] * 13)):
        sim.add(request)
    sim.run()
    sim.scheduler.reset_prefix_cache()
    sound, calls = connector.allocated, []

    def fails(*arguments):
        calls.append(arguments)
        if len(calls) == 2:
            raise KeyError("a bug")
        sound(*arguments)

    connector.allocated = fails
    sim.worker.strict = False  # the step reads what nobody loads, and its tokens are dropped
    requests = [make_request("c", list(range(30))), make_request("d", [7] * 13)]
    for request in requests:
        sim.add(request)
    drain(sim, 100)
    assert len(calls) == 2
    assert not sim.scheduler.lifecycle.loading
    requests.append(make_request("e", list(range(30))))  # finds in the cache what the first has computed
    sim.add(requests[-1])
    sim.run()
    for request in requests:
        sim.check(request)


@pytest.mark.parametrize(
    ("method", "answer"),
    [
        ("matched_tokens", None),
        ("matched_tokens", 4),
        ("matched_tokens", ("four", True)),
        ("matched_tokens", (4.0, False)),
        ("finished", None),
        ("finished", True),
        ("finished", (True, {}, "more")),
        ("finished", (False, "parameters")),
        ("build_message", "no bytes"),
        ("build_message", 7),
        ("update", 7),
        ("update", [{}]),
    ],
)
def test_an_answer_that_is_none_costs_the_connectors_help(method, answer, clock):
    sim, connector = simulation()
    asked = []
    setattr(connector, method, lambda *arguments: asked.append(method) or answer)
    requests = [make_request(name, [ord(name)] * 13) for name in "abc"]
    for request in requests:
        sim.add(request)
    drain(sim)
    clock[0] += holds.MAX_SECONDS + 1
    sim.run()
    assert asked
    for request in requests:
        sim.check(request)
    assert not sim.scheduler.lifecycle.held
    sim.check_references()


def test_the_log_names_the_connector(caplog):
    connector = ToldConnector(layout=make_layout(60))
    object.__setattr__(connector.setup, "plugin", "mine:shelf")
    sim = Simulation(layout=make_layout(60), connector=connector)
    connector.broken = {"build_message"}
    sim.add(make_request("a", list(range(13))))
    sim.step()
    assert "KV connector mine:shelf failed in build_message" in caplog.text
