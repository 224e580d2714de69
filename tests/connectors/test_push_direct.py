"""Two engines, one of which writes the blocks of prompts to the other's device: files stand in for its memory."""

from __future__ import annotations

import logging
import random
import threading
import time
from functools import partial

import pytest

from frame.plugins.connectors.push import carrier as push_carrier, lane as push_lane, worker as push_worker
from frame.testing import ConnectorSuite
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from tests.connectors.mapped_files import FileSharing
from tests.connectors.push_pairs import SECONDS, Pairs, counter, inbox, moved
from tests.free_ports import free_ports


@pytest.fixture
def pairs(tmp_path):
    made = Pairs(tmp_path)
    made.options |= {"device_bytes": 1 << 18}
    yield made
    made.close()


class Shared(list):
    """The sharing of each worker, in the order in which they were made; the next ones get these `given`."""

    def __init__(self, folder):
        super().__init__()
        self.folder, self.given = folder, {}

    def make(self, device):
        self.append(FileSharing(self.folder, **self.given))
        return self[-1]


@pytest.fixture
def shared(monkeypatch, tmp_path):
    made = Shared(tmp_path)
    monkeypatch.setattr(push_worker, "sharing_of", made.make)
    return made


@pytest.fixture
def no_stream(monkeypatch):
    """No block may cross a connection."""
    monkeypatch.setattr(push_carrier, "send_bytes", lambda *given: pytest.fail("blocks went over the connection"))


def buffer(engine, rank=0):
    return inbox(engine, rank).buffer.arena


def travel(pairs, there, here, name="one", length=40, seed=0):
    """A prompt is computed by one engine and continued by the other, which computes its last token."""
    prompt = pairs.prompt(length, seed=seed)
    params = pairs.prefill(there, here, f"p {name}", prompt)
    assert pairs.decode(here, f"d {name}", prompt, params) == moved(here.layout, length)


OFTEN = ("full", "groups of unequal blocks", "states beside windows")


@pytest.mark.parametrize(
    "shape",
    [
        pytest.param(shape, id=name, marks=[] if name in OFTEN else [pytest.mark.matrix])
        for name, shape in ConnectorSuite.layouts.items()
    ],
)
def test_all_tokens_of_prompts_but_the_last_are_written_to_the_device(pairs, shared, no_stream, shape):
    layout = make_layout(**shape)
    there, here = pairs.engine(layout, max_num_batched_tokens=16), pairs.engine(layout)
    for number, length in enumerate((22, 40, 17, 33)):
        travel(pairs, there, here, str(number), length, number)
    pairs.rest(there, here)
    assert pairs.told(there, "direct_bytes") > 0
    assert counter(there, "unsent_prompts") == counter(here, "failed_blocks") == 0
    assert counter(there, "direct_bytes") == counter(there, "sent_bytes") == counter(here, "received_bytes")
    assert buffer(here).used_bytes == inbox(here).arena.used_bytes == 0


def test_blocks_stay_on_the_device_once_the_other_engine_is_known(pairs, shared, no_stream, monkeypatch):
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    sendings = there.workers.made[0].transfer.inner._sendings
    monkeypatch.setattr(sendings._arena, "take", lambda size: pytest.fail("blocks crossed host memory"))
    monkeypatch.setattr(inbox(here).arena, "take", lambda size: pytest.fail("blocks crossed host memory"))
    travel(pairs, there, here, "two", seed=1)
    pairs.rest(there, here)


def test_who_decodes_may_ask_first_or_much_later(pairs, shared, no_stream):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    first, later = pairs.prompt(40), pairs.prompt(40, seed=1)
    pairs.add(here, "first", first, {"do_remote_prefill": True})
    for _ in range(3):
        here.step()
    for name, prompt in (("a", first), ("b", later)):
        pairs.add(there, name, prompt, pairs.asks(here), 1)
    pairs.rest(there, here)
    assert here.num_cached("first") == 39
    assert buffer(here).used_bytes > 0
    assert pairs.decode(here, "later", later) == 39
    pairs.rest(there, here)
    assert buffer(here).used_bytes == 0


def test_two_ranks_each_write_to_their_own(pairs, shared, no_stream):
    layout = make_layout(ranks=2)
    there, here = pairs.engine(layout, ranks=2), pairs.engine(layout, ranks=2, late=3)
    for number, length in enumerate((22, 40)):
        travel(pairs, there, here, str(number), length, number)
    pairs.rest(there, here)
    assert len(shared) == 4
    assert all(one.writes for one in shared[:2])


@pytest.mark.parametrize(
    ("side", "given", "why"),
    [
        ("takes", {"faults": ["export"]}, "it has no handle"),
        ("takes", {"faults": ["allocate"]}, "the device has not got that much"),
        ("takes", {"free": 1 << 20}, "0.0 GiB of the device's memory are free, 0.5 GiB are needed"),
        ("takes", {"faults": ["move"]}, "the launch fails"),
        ("sends", {"faults": ["open"]}, "the driver refuses it"),
        ("sends", {"faults": ["read"]}, "what is read there is not what was written"),
        ("sends", {"faults": ["write"]}, "what is written there does not arrive"),
        ("sends", {"faults": ["copy"]}, "the launch fails"),
    ],
    ids=lambda one: one if isinstance(one, str) and one in ("takes", "sends") else None,
)
def test_where_memory_cannot_be_mapped_blocks_cross_host_memory(pairs, shared, caplog, side, given, why):
    caplog.set_level("INFO", "frame.connectors.push")
    shared.given = given if side == "takes" else {}
    here = pairs.engine(kv_role="consumer")
    shared.given = given if side == "sends" else {}
    there = pairs.engine(kv_role="producer")
    for number in range(2):
        travel(pairs, there, here, str(number), seed=number)
    pairs.rest(there, here)
    assert pairs.told(there, "direct_bytes") == 0
    assert sum(why in one.message for one in caplog.records) == 1
    assert not shared[-1].mapped


def test_an_engine_that_may_not_is_not_asked(pairs, shared, caplog):
    caplog.set_level("INFO", "frame.connectors.push")
    there, here = pairs.engine(), pairs.engine(options={"direct": False})
    travel(pairs, there, here)
    assert "that engine lets no memory of a device be mapped" in caplog.text
    other = pairs.engine(options={"direct": False})
    travel(pairs, other, here, "two", seed=1)
    pairs.rest(there, here, other)
    assert pairs.told(there, "direct_bytes") == pairs.told(other, "direct_bytes") == 0


def test_what_does_not_fit_on_the_device_crosses_host_memory(pairs, shared):
    """Once it has waited for a while."""
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    pairs.rest(there, here)
    (lane,) = there.workers.made[0].transfer.inner._lanes._lanes.values()
    lane._patience = 0.3
    before = pairs.told(there, "direct_bytes")
    held = buffer(here).take((1 << 18) - 512)
    travel(pairs, there, here, "two", seed=1)
    assert pairs.told(there, "direct_bytes") == before
    assert counter(there, "sent_bytes") == 2 * before
    buffer(here).give_back(held)
    travel(pairs, there, here, "three", seed=2)
    pairs.rest(there, here)
    assert pairs.told(there, "direct_bytes") == 2 * before
    assert counter(here, "failed_blocks") == 0
    assert buffer(here).used_bytes == inbox(here).arena.used_bytes == 0


def test_a_full_buffer_delays(pairs, shared, no_stream):
    """Those go first that came first, and others go on meanwhile."""
    layout = make_layout(num_blocks=200)
    there, here = pairs.engine(layout, max_num_batched_tokens=16), pairs.engine(layout)
    travel(pairs, there, here)
    held = buffer(here).take((1 << 18) - 512)
    for number in range(3):
        prompt = pairs.prompt(40, seed=1 + number)
        pairs.add(there, f"p{number}", prompt, pairs.asks(here), 1)
        pairs.add(here, f"d{number}", prompt, {"do_remote_prefill": True})
    pairs.until(lambda: len(inbox(here)._waiting) == 3, there, here)
    lane = next(iter(there.workers.made[0].transfer.inner._lanes._lanes.values()))
    pairs.until(lambda: [one.owner for one, _ in lane._waiting.copy()] == ["p0", "p1", "p2"], there)
    for engine in (there, here):
        name = f"other {engine is there}"
        engine.run(request(name, pairs.prompt(20, seed=9), 3), until=partial(engine.ended, name))
    assert not here.ended("d0")
    buffer(here).give_back(held)
    pairs.rest(there, here)
    assert [here.num_cached(f"d{number}") for number in range(3)] == [39] * 3
    assert counter(there, "unsent_prompts") == counter(here, "failed_blocks") == buffer(here).used_bytes == 0
    assert not inbox(here)._waiting


def test_a_prompt_that_is_aborted_while_it_waits_for_room_is_computed(pairs, shared):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    travel(pairs, there, here)
    held = buffer(here).take((1 << 18) - 512)
    prompt = pairs.prompt(40, seed=1)
    pairs.add(there, "p", prompt, pairs.asks(here), 1)
    pairs.add(here, "d", prompt, {"do_remote_prefill": True})
    for _ in range(2):  # of eight that compute the prompt
        there.step()
    pairs.until(lambda: inbox(here)._waiting, here)
    there.engine.abort(["p"])
    pairs.until(lambda: here.ended("d"), there, here)
    assert here.num_cached("d") == 0
    assert held is not None
    pairs.until(lambda: not (there.busy or here.busy), there, here)


def test_an_answer_that_comes_late_delays_no_step(pairs, shared, no_stream):
    """Not that of its own request either, and blocks are written when it comes, without one."""
    there, here = pairs.engine(max_num_batched_tokens=16), pairs.engine()
    travel(pairs, there, here)
    pairs.rest(there, here)
    begin, passed = inbox(here)._begin, threading.Event()
    inbox(here)._begin = lambda *given: passed.wait(SECONDS) and begin(*given)
    before = len(shared[0].writes)
    pairs.add(there, "p", pairs.prompt(40, seed=1), pairs.asks(here), 5)
    pairs.until(lambda: len(there.outputs["p"]) > 1, there)
    assert len(shared[0].writes) == before
    passed.set()
    pairs.until(lambda: len(shared[0].writes) == before + 20)
    assert pairs.decode(here, "d", pairs.prompt(40, seed=1)) == 39
    pairs.rest(there, here)


def test_blocks_stay_while_what_was_asked_late_is_written(pairs, shared, no_stream):
    """Though what the step wrote of later chunks has arrived."""
    there, here = pairs.engine(max_num_batched_tokens=16), pairs.engine()
    travel(pairs, there, here)
    pairs.rest(there, here)
    inner = there.workers.made[0].transfer.inner
    begin, passed, late = inbox(here)._begin, threading.Event(), threading.Event()
    inbox(here)._begin = lambda *given: passed.wait(SECONDS) and begin(*given)
    pairs.add(there, "p", pairs.prompt(40, seed=1), pairs.asks(here), 1)
    there.step()
    there.step()
    inner._late_queue.run(lambda: late.wait(SECONDS))
    passed.set()
    pairs.until(lambda: inner._sendings._sendings["p"].parcel.answered)
    pairs.until(lambda: there.ended("p"), there)
    for _ in range(20):
        there.step()
        time.sleep(0.001)
    assert there.held == ["p"]
    late.set()
    assert pairs.decode(here, "d", pairs.prompt(40, seed=1)) == 39
    pairs.rest(there, here)


def test_the_end_of_a_prompt_waits_for_no_other_prompt(pairs, shared, no_stream):
    """Which is still computed, so that what is written of it waits."""
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    pairs.rest(there, here)
    before, passed = len(shared[0].writes), threading.Event()
    pairs.add(there, "p", pairs.prompt(40, seed=1), pairs.asks(here), 4)
    pairs.until(lambda: there.outputs["p"], there)
    pairs.until(lambda: len(shared[0].writes) == before + 20)
    there.workers.made[0].transfer.inner._send_queue.run(lambda: passed.wait(SECONDS))  # as long as layers take
    pairs.add(there, "q", pairs.prompt(40, seed=2), pairs.asks(here), 1)
    pairs.until(lambda: there.ended("p") and there.ended("q"), there)
    assert pairs.decode(here, "d", pairs.prompt(40, seed=1)) == 39
    assert not passed.is_set()
    passed.set()
    assert pairs.decode(here, "e", pairs.prompt(40, seed=2)) == 39
    pairs.rest(there, here)


def test_who_answers_between_layers_gets_those_before_too(pairs, shared, no_stream):
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    pairs.rest(there, here)
    sendings = there.workers.made[0].transfer.inner._sendings
    layer_done, ran = sendings.layer_done, []

    def slow(number):
        if ran:  # all have answered before the second layer
            pairs.until(lambda: all(due.sending.parcel.answered for due in sendings._dues))
        ran.append(number)
        layer_done(number)
        if len(ran) > 1:
            assert all(one.all() for due in sendings._dues for one in due.sending.staged)

    there.workers.made[0].transfer.inner.hooks.sendings.layer_done = slow
    travel(pairs, there, here, "two", seed=1)
    assert ran
    pairs.rest(there, here)


def test_what_fits_nowhere_is_refused_and_computed(pairs, shared):
    pairs.options["expiry_seconds"] = 1
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    held = [arena.take(1 << 18) for arena in (buffer(here), inbox(here).arena)]
    prompt = pairs.prompt(40, seed=1)
    pairs.prefill(there, here, "p", prompt)
    assert pairs.decode(here, "d", prompt) == 0
    pairs.rest(there, here)
    assert all(one is not None for one in held)


def test_no_step_waits_for_a_device_that_does_not_write(pairs, shared):
    """The other engine dies meanwhile: its connection says so, and what is under way harms nobody."""
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    pairs.rest(there, here)
    shared[0].writing.clear()
    shared[0].pause.set()
    pairs.add(there, "p", pairs.prompt(40, seed=1), pairs.asks(here), 1)
    pairs.until(lambda: there.ended("p") and shared[0].writing.is_set(), there)
    here.close()
    pairs.made.remove(here)
    for number in range(3):
        name = f"more {number}"
        there.run(request(name, pairs.prompt(20, seed=number), 3), until=partial(there.ended, name))
    assert there.held == ["p"]  # of which blocks are read
    shared[0].passed.set()
    pairs.rest(there)
    pairs.until(lambda: not shared[0].mapped)
    assert pairs.unsent(there) == 1


def test_a_sender_that_closes_is_not_gone_before_its_last_write_has_ended(pairs, shared):
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    pairs.rest(there, here)
    shared[0].writing.clear()
    shared[0].pause.set()
    pairs.add(there, "p", pairs.prompt(40, seed=1), pairs.asks(here), 1)
    pairs.until(shared[0].writing.is_set, there)
    closes = threading.Thread(target=there.close)
    closes.start()
    time.sleep(0.2)
    assert closes.is_alive()
    assert not inbox(here)._lost
    assert buffer(here).used_bytes > 0
    shared[0].passed.set()
    closes.join()
    pairs.until(lambda: inbox(here)._lost)
    pairs.made.remove(there)


def test_an_engine_that_hears_nothing_of_a_writer_says_which_and_of_how_much(pairs, shared, caplog):
    """A sender that is stuck in a write, though it was told that nobody takes it: nobody else gets that memory."""
    caplog.set_level(logging.INFO)
    there, here = pairs.engine(), pairs.engine(options={"expiry_seconds": 1})
    travel(pairs, there, here)
    pairs.rest(there, here)
    shared[0].writing.clear()
    shared[0].pause.set()
    pairs.add(there, "p", pairs.prompt(40, seed=1), pairs.asks(here), 1)
    pairs.until(shared[0].writing.is_set, there)
    (lane,) = there.workers.made[0].transfer.inner._lanes._lanes.values()
    lane._connection.sendall(bytes(64))  # which is no message
    pairs.until(lambda: "does not hang up" in caplog.text, here)
    used = buffer(here).used_bytes
    assert used > 0
    assert f"{used} bytes of this device's memory, to which it may write, are not used until it does" in caplog.text
    assert not inbox(here)._lost
    shared[0].passed.set()
    pairs.until(lambda: "has hung up" in caplog.text, there)
    pairs.until(lambda: inbox(here)._lost)
    pairs.until(lambda: inbox(here).take() and buffer(here).used_bytes == 0)
    pairs.rest(there, here)


def test_an_engine_that_ends_has_its_memory_back_from_an_idle_one(pairs, shared, monkeypatch):
    monkeypatch.setattr(push_lane, "_WATCH_SECONDS", 0.05)
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    pairs.rest(there, here)
    assert shared[0].mapped
    here.close()
    pairs.made.remove(here)
    pairs.until(lambda: not shared[0].mapped)


def test_memory_is_given_back_when_the_sender_closes(pairs, shared):
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    pairs.rest(there, here)
    there.close()
    pairs.made.remove(there)
    assert not shared[0].mapped


def test_a_copy_that_fails_costs_the_computation_and_the_other_engine_is_met_anew(pairs, shared):
    there, here = pairs.engine(), pairs.engine()
    travel(pairs, there, here)
    shared[0].faults.add("launch")
    prompt = pairs.prompt(40, seed=1)
    pairs.prefill(there, here, "p", prompt)
    assert pairs.decode(here, "d", prompt) == 0
    assert pairs.unsent(there) == 1
    shared[0].faults.clear()
    travel(pairs, there, here, "again", seed=2)
    pairs.rest(there, here)
    pairs.given_back(here, buffer(here))


def test_an_engine_without_a_device_takes_what_one_with_a_device_sends_after_it_came_back(pairs, shared):
    there, here = pairs.engine(), pairs.engine(options={"port": free_ports()})
    travel(pairs, there, here)
    pairs.rest(there, here)
    asks = pairs.asks(here)
    here.close()
    pairs.made.remove(here)
    here = pairs.engine(options={"port": asks["remote_port"], "direct": False})
    for name in ("a", "b"):
        one = pairs.prompt(40, seed=ord(name))
        pairs.add(there, name, one, asks, 1)
        pairs.finish(there, name)
        assert pairs.decode(here, name, one) == 39
    pairs.rest(there, here)


@pytest.mark.parametrize("steps", [2, *(pytest.param(steps, marks=pytest.mark.matrix) for steps in (0, 5, 9))])
def test_aborts_give_everything_back(pairs, shared, steps):
    there, here = pairs.engine(max_num_batched_tokens=7), pairs.engine(options={"wait_seconds": 0.5})
    travel(pairs, there, here)
    for number, (engine, name) in enumerate([(here, "d 0"), (there, "p 1")]):
        prompt = pairs.prompt(40, seed=5 + number)
        pairs.add(here, f"d {number}", prompt, {"do_remote_prefill": True})
        pairs.add(there, f"p {number}", prompt, pairs.asks(here), 1)
        for _ in range(steps):
            there.step()
            here.step()
            time.sleep(0.001)
        engine.engine.abort([name])
        pairs.until(lambda: not (there.busy or here.busy), there, here)
    here.check("d 1")
    assert there.engine.stats().kv_usage == here.engine.stats().kv_usage == 0


def test_sleep_takes_the_cache_away_and_leaves_the_buffer(pairs, shared):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    for number, engine in enumerate((there, here)):
        pairs.prefill(there, here, f"p{number}", pairs.prompt(40, seed=number))
        pairs.rest(there)
        engine.engine.call("sleep")
        engine.engine.call("wake_up")
        assert pairs.decode(here, f"d{number}", pairs.prompt(40, seed=number)) == 39
    pairs.rest(there, here)
    assert buffer(here).used_bytes == 0


def test_reset_drops_what_came(pairs, shared):
    there, here = pairs.engine(), pairs.engine(options={"wait_seconds": 0.3})
    pairs.prefill(there, here, "p", pairs.prompt(40))
    pairs.rest(there)
    assert buffer(here).used_bytes > 0
    here.run(request("other", pairs.prompt(8, seed=3)))
    assert here.engine.call("reset_prefix_cache", {"reset_connector": True})
    assert pairs.decode(here, "d", pairs.prompt(40)) == 0
    pairs.rest(here)
    pairs.until(lambda: buffer(here).used_bytes == 0)  # once its writer has said that it has ended


def test_two_requests_of_one_prompt_are_written_once(pairs, shared, no_stream):
    """The second may not have the first one's memory given to others while that is written to."""
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    travel(pairs, there, here)
    prompt = pairs.prompt(40, seed=1)
    for name in ("a", "b"):
        one = request(name, prompt, 1, prompt_logprobs=1)  # so that each computes all of it
        one.kv_transfer = pairs.asks(here)
        there.add(one)
    pairs.until(lambda: there.ended("a") and there.ended("b"), there)
    pairs.rest(there, here)
    assert pairs.decode(here, "d", prompt) == 39
    pairs.rest(there, here)
    assert counter(here, "failed_blocks") == 0


def test_what_nobody_claims_expires(pairs, shared):
    there, here = pairs.engine(), pairs.engine(options={"wait_seconds": 0.2})
    pairs.prefill(there, here, "p", pairs.prompt(40))
    pairs.rest(there)
    pairs.arrived(here)
    pairs.given_back(here, buffer(here))
    assert here.engine.stats().connector_gauges["push_device_buffer_used_bytes"] == 0
    assert pairs.decode(here, "d", pairs.prompt(40)) == 0
    pairs.rest(here)


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(1, 30))])
def test_random_lives(pairs, shared, seed):
    """Prompts through two prefill engines and a small decode engine, with preemptions, aborts and broken steps."""
    pairs.options["device_bytes"] = 1 << 16
    draw = random.Random(seed)
    layout = make_layout(num_blocks=44, windows=(0, 6))
    here = pairs.random_life(draw, layout, (7, 64))
    assert counter(here, "loaded_blocks") > 0
    assert any(one.writes for one in shared)
