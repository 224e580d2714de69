"""Two engines, one of which sends the blocks of prompts to the other: what travels, and that nothing is lost."""

from __future__ import annotations

import random
import socket
import threading
import time

import pytest
from msgspec import structs

from frame.interfaces import decode, encode
from frame.plugins.connectors.blocks.wire import PeerError
from frame.plugins.connectors.push import decode_side, lane as push_lane, lanes as push_lanes
from frame.plugins.connectors.push.carrier import Stream
from frame.plugins.connectors.push.facts import Facts
from frame.plugins.connectors.push.lanes import Lanes
from frame.plugins.connectors.push.messages import Goal, Hello
from frame.plugins.connectors.push.parcels import Parcel
from frame.plugins.connectors.push.wire import Ready
from frame.testing import ConnectorSuite
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from frame.testing.fake_memory import FakeMemory
from tests.connectors.push_pairs import NEVER, SECONDS, Pairs, counter, inbox, moved, port
from tests.free_ports import free_ports


@pytest.fixture
def pairs(tmp_path):
    made = Pairs(tmp_path)
    yield made
    made.close()


SHAPES = ConnectorSuite.layouts


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES.keys())
def test_all_tokens_of_prompts_but_the_last_travel(pairs, shape):
    layout = make_layout(**shape)
    there, here = pairs.engine(layout), pairs.engine(layout)
    for number, length in enumerate((22, 40, 17, 33, 3)):
        prompt = pairs.prompt(length, seed=number)
        params = pairs.prefill(there, here, f"p{number}", prompt)
        last = moved(layout, length)
        assert (params is None) == (last == 0)
        assert pairs.decode(here, f"d{number}", prompt, params) == last
    pairs.rest(there, here)
    assert counter(there, "unsent_prompts") == 0
    assert inbox(here).arena.used_bytes == 0


@pytest.mark.parametrize("budget", [3, 5, 64])
def test_chunks_add_up(pairs, budget):
    there, here = pairs.engine(max_num_batched_tokens=budget), pairs.engine()
    for number in range(3):
        prompt = pairs.prompt(40, seed=number)
        pairs.prefill(there, here, f"p{number}", prompt)
        assert pairs.decode(here, f"d{number}", prompt) == 39
    pairs.rest(there, here)


def test_who_decodes_may_ask_before_who_computes_is_asked(pairs):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    prompt = pairs.prompt(40)
    pairs.add(here, "d", prompt, {"do_remote_prefill": True})
    for _ in range(5):
        here.step()
    pairs.add(there, "p", prompt, pairs.asks(here), 1)
    pairs.rest(there, here)
    assert here.num_cached("d") == 39


def test_blocks_leave_while_the_prompt_is_computed(pairs):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    pairs.add(there, "p", pairs.prompt(40), pairs.asks(here), 1)
    for _ in range(3):  # of eight that compute the prompt
        there.step()
    pairs.until(lambda: inbox(here)._counts.num_bytes > 0)
    assert not there.ended("p")
    pairs.rest(there)
    assert pairs.told(there, "sent_bytes") > 0


def test_what_the_proxy_gets_is_what_proxies_know(pairs):
    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, here, "p", pairs.prompt(22))
    assert params["do_remote_prefill"] is True
    assert params["do_remote_decode"] is False
    assert (params["remote_engine_id"], params["remote_request_id"]) == ("engine-under-test", "p")
    assert (params["tp_size"], params["transfer_mode"]) == (1, "push")


def test_who_sends_can_be_told_where_to(pairs):
    here = pairs.engine()
    there = pairs.engine(options={"decode": f"127.0.0.1:{port(here)}"})
    nulls = {"remote_host": None, "remote_port": None, "remote_engine_id": None, "remote_block_ids": None}
    params = pairs.prefill(there, here, "p", pairs.prompt(40), **nulls)
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 39
    pairs.rest(there, here)


def test_who_is_sent_nothing_although_another_engine_was_waits_little(pairs):
    pairs.patch.setattr(decode_side, "ANSWERED_SECONDS", 1.0)
    there, here, other = pairs.engine(), pairs.engine(), pairs.engine()
    params = pairs.prefill(there, here, "p", pairs.prompt(40))
    assert pairs.decode(other, "d", pairs.prompt(40), params) == 0
    pairs.rest(there, other)


def test_found_prefixes_travel_too(pairs):
    there, here = pairs.engine(), pairs.engine()
    there.run(request("before", pairs.prompt(30)))
    pairs.prefill(there, here, "p", pairs.prompt(40))
    assert there.num_cached("p") == 28
    assert pairs.decode(here, "d", pairs.prompt(40)) == 39
    pairs.rest(there, here)


def test_a_prompt_that_another_computes_in_the_same_step_travels(pairs):
    there, here = pairs.engine(), pairs.engine()
    for name in ("a", "b"):
        pairs.add(there, name, pairs.prompt(24) + pairs.prompt(9, seed=ord(name)), pairs.asks(here), 1)
    pairs.rest(there)
    for name in ("a", "b"):
        assert pairs.decode(here, name, pairs.prompt(24) + pairs.prompt(9, seed=ord(name))) == 32
    pairs.rest(there, here)


def test_what_is_here_already_is_not_loaded(pairs):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    here.run(request("before", prompt[:17]))
    pairs.prefill(there, here, "p", prompt)
    assert pairs.decode(here, "d", prompt) == 39
    assert counter(here, "loaded_blocks") == 6
    pairs.prefill(there, here, "again", prompt)
    pairs.arrived(here, there)  # what comes after its request has gone stays until it expires
    assert pairs.decode(here, "e", prompt) == 36
    assert counter(here, "loaded_blocks") == 6
    pairs.rest(there, here)
    pairs.until(lambda: inbox(here).arena.used_bytes == 0, here)


def test_one_that_may_not_use_cached_blocks_lets_them_go(pairs):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    params = pairs.prefill(there, here, "p", prompt)
    # what comes after its request has gone stays until it expires, since another request may want it
    pairs.arrived(here, there)
    one = request("d", prompt, 4, prompt_logprobs=1)
    one.kv_transfer = params
    here.add(one)
    pairs.finish(here, "d")
    assert here.num_cached("d") == 0
    pairs.rest(there, here)
    here.run(request("later", pairs.prompt(8)))
    assert inbox(here).arena.used_bytes == 0


def test_one_whose_prompt_may_not_be_found_is_sent_when_it_ends(pairs):
    there, here = pairs.engine(), pairs.engine()
    one = request("p", pairs.prompt(40), 1, prompt_logprobs=1)
    one.kv_transfer = pairs.asks(here)
    there.add(one)
    assert pairs.finish(there, "p") is not None
    assert pairs.decode(here, "d", pairs.prompt(40)) == 39
    pairs.rest(there, here)


def test_little_memory_for_sending_delays_and_loses_nothing(pairs):
    """One layer's blocks of a prompt of 40 tokens take 10 times 256 bytes or more."""
    there, here = pairs.engine(options={"send_buffer_bytes": 1 << 16}), pairs.engine()
    arena = there.workers.made[0].transfer.inner._sendings._arena
    kept = arena.take(arena.num_bytes - 1024)
    params = [pairs.prefill(there, here, f"p{number}", pairs.prompt(40, seed=number)) for number in range(3)]
    for number, found in enumerate(params):
        pairs.add(here, f"d{number}", pairs.prompt(40, seed=number), found)
    pairs.until(lambda: not (there.busy or here.busy), there, here)
    assert [here.num_cached(f"d{number}") for number in range(3)] == [39] * 3
    arena.give_back(kept)
    pairs.rest(there, here)


def test_no_memory_for_sending_ends_with_the_deadline(pairs):
    there, here = pairs.engine(options={"expiry_seconds": 1}), pairs.engine()
    arena = there.workers.made[0].transfer.inner._sendings._arena
    kept = arena.take(arena.num_bytes)
    params = pairs.prefill(there, here, "p", pairs.prompt(40))
    assert there.busy
    pairs.until(lambda: not there.busy, there)
    arena.give_back(kept)
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    assert pairs.unsent(there) == 1
    pairs.rest(there, here)


@pytest.mark.parametrize("steps", [0, 2, 5, 9])
def test_aborts_where_it_is_decoded_give_everything_back(pairs, steps):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    pairs.add(here, "d", prompt, {"do_remote_prefill": True})
    pairs.add(here, "stays", pairs.prompt(30, seed=4), None)
    pairs.add(there, "p", prompt, pairs.asks(here), 1)
    for _ in range(steps):
        there.step()
        here.step()
        time.sleep(0.001)
    here.engine.abort(["d"])
    pairs.until(lambda: not (there.busy or here.busy), there, here)
    here.check("stays")
    assert there.engine.stats().kv_usage == here.engine.stats().kv_usage == 0


@pytest.mark.parametrize("steps", [0, 3, 6])
def test_aborts_where_it_is_computed_cost_the_computation(pairs, steps):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine(options={"wait_seconds": 0.5})
    prompt = pairs.prompt(40)
    pairs.add(there, "p", prompt, pairs.asks(here), 1)
    pairs.add(here, "d", prompt, {"do_remote_prefill": True})
    for _ in range(steps):
        there.step()
        here.step()
    there.engine.abort(["p"])
    pairs.until(lambda: not (there.busy or here.busy), there, here)
    here.check("d")
    assert there.engine.stats().kv_usage == 0


def test_an_end_other_than_stop_and_length_sends_nothing(pairs):
    there, here = pairs.engine(broken_steps=[0]), pairs.engine(options={"wait_seconds": 0.5})
    assert pairs.prefill(there, here, "p", pairs.prompt(40)) is None
    assert there.outputs["p"][-1].finish_reason == "error"
    assert pairs.decode(here, "d", pairs.prompt(40)) == 0
    pairs.rest(here)


@pytest.mark.parametrize("broken", [1, 2, 4, *(pytest.param(step, marks=pytest.mark.matrix) for step in (3, 5, 6, 7))])
def test_a_step_that_fails_where_it_is_computed_sends_nothing_wrong(pairs, broken):
    there = pairs.engine(broken_steps=[broken], max_num_batched_tokens=7)
    here = pairs.engine(options={"wait_seconds": 0.2})
    for number in range(3):
        pairs.add(there, f"p{number}", pairs.prompt(30, seed=number % 2), pairs.asks(here), 1)
        there.step()
    pairs.until(lambda: not there.busy, there)
    for number in range(3):
        pairs.decode(here, f"d{number}", pairs.prompt(30, seed=number % 2))
    pairs.rest(here)


def test_what_nobody_claims_expires(pairs):
    there, here = pairs.engine(), pairs.engine(options={"wait_seconds": 0.2})
    pairs.prefill(there, here, "p", pairs.prompt(40))
    pairs.rest(there)
    pairs.arrived(here)
    assert inbox(here).arena.used_bytes > 0
    pairs.given_back(here, inbox(here).arena)
    assert pairs.decode(here, "d", pairs.prompt(40)) == 0
    pairs.rest(here)


def test_more_than_the_memory_is_refused_and_computed(pairs):
    """A prompt of 40 tokens takes 10 blocks of 256 bytes in each of two layers."""
    there, here = pairs.engine(), pairs.engine(options={"buffer_bytes": 1 << 16})
    held = inbox(here).arena.take((1 << 16) - 2 * 10 * 256)
    assert pairs.prefill(there, here, "a", pairs.prompt(40)) is not None
    pairs.rest(there)
    pairs.prefill(there, here, "b", pairs.prompt(40, seed=1))
    pairs.until(lambda: not there.busy, there)
    assert pairs.decode(here, "b", pairs.prompt(40, seed=1)) == 0  # it does not wait for blocks that were refused
    assert pairs.decode(here, "a", pairs.prompt(40)) == 39
    pairs.rest(there, here)
    assert held is not None


def test_two_requests_for_one_prompt_load_once(pairs):
    there, here = pairs.engine(), pairs.engine()
    prompt = pairs.prompt(40)
    for name in ("0_d", "1_d"):
        pairs.add(here, name, prompt, {"do_remote_prefill": True})
    here.step()
    pairs.prefill(there, here, "p", prompt)
    pairs.until(lambda: not here.busy, there, here)
    assert [here.num_cached(name) for name in ("0_d", "1_d")] == [39, 36]
    assert counter(here, "loaded_blocks") == 10
    pairs.rest(there, here)


def test_more_than_the_share_is_not_kept(pairs, caplog):
    there, here = pairs.engine(make_layout(num_blocks=33), options={"max_held_share": 0.5}), pairs.engine()
    worker = there.workers.made[0].transfer.inner
    kept = worker._sendings._arena.take(worker._sendings._arena.num_bytes)  # so nothing can leave
    assert pairs.prefill(there, here, "a", pairs.prompt(40)) is not None
    assert pairs.prefill(there, here, "b", pairs.prompt(40, seed=1)) is None
    assert "max_held_share" in caplog.text
    there.step()
    assert there.engine.stats().connector_gauges["push_held_blocks"] == 10
    worker._sendings._arena.give_back(kept)
    pairs.rest(there)
    assert there.engine.stats().connector_gauges["push_held_blocks"] == 0


def test_parameters_that_are_not_right_cost_the_computation(pairs):
    there, here = pairs.engine(), pairs.engine(options={"wait_seconds": 0.05})
    for number, changes in enumerate(
        [
            {"remote_host": "localhost"},  # not the address of this engine, nor among its peers
            {"remote_port": 1},
            {"remote_port": True},
            {"remote_port": 1 << 16},
            {"remote_host": None},
            {"remote_host": 5},
            {"do_remote_decode": "yes"},
        ]
    ):
        prompt = pairs.prompt(40, seed=number)
        pairs.prefill(there, here, f"p{number}", prompt, **changes)
        assert pairs.decode(here, f"d{number}", prompt) == 0
    pairs.rest(there, here)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"remote_host": "localhost"}, "remote_host 'localhost' is none of the hosts of --plugin.push.peers (none are"),
        ({"remote_port": True}, "kv_transfer_params: remote_port must be a port from 1 to 65535, got True; the blocks"),
        (
            {"remote_host": 5},
            "kv_transfer_params: remote_host must be a text of 1 to 512 characters, got 5; the blocks",
        ),
        ({"remote_port": None}, "kv_transfer_params: remote_port is missing; the blocks of such prompts are not sent"),
    ],
)
def test_a_wrong_parameter_is_named_once_and_the_option_does_not_stand_for_it(pairs, caplog, changes, said):
    here = pairs.engine(options={"wait_seconds": 0.05})
    there = pairs.engine(options={"decode": f"127.0.0.1:{port(here)}"})
    for number in range(2):
        prompt = pairs.prompt(40, seed=number)
        pairs.prefill(there, here, f"p{number}", prompt, **changes)
        assert pairs.decode(here, f"d{number}", prompt) == 0
    assert caplog.text.count(said) == 1
    pairs.rest(there, here)


def test_blocks_go_to_nobody_who_does_not_know_the_prompt_and_its_salt(pairs):
    there, here = pairs.engine(), pairs.engine(options={"wait_seconds": 0.3})
    params = pairs.prefill(there, here, "p", pairs.prompt(40), salt="a")
    pairs.rest(there)
    for number, (prompt, salt) in enumerate([(pairs.prompt(40), "b"), (pairs.prompt(40, seed=1), "a")]):
        assert pairs.decode(here, f"d{number}", prompt, params, salt) == 0
    here.connector.inner.arrivals._patience = NEVER
    assert pairs.decode(here, "right", pairs.prompt(40), params, "a") == 39


def test_two_ranks_each_send_their_own(pairs):
    layout = make_layout(ranks=2)
    there, here = pairs.engine(layout, ranks=2), pairs.engine(layout, ranks=2, late=3)
    for number, length in enumerate((22, 40)):
        prompt = pairs.prompt(length, seed=number)
        params = pairs.prefill(there, here, f"p{number}", prompt)
        assert params["tp_size"] == 2
        assert pairs.decode(here, f"d{number}", prompt, params) == length - 1
    pairs.rest(there, here)


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_rank_lacks_is_computed(pairs, rank):
    layout = make_layout(ranks=2)
    there, here = pairs.engine(layout, ranks=2), pairs.engine(layout, ranks=2)
    held = inbox(here, rank).arena.take(1 << 18)
    pairs.prefill(there, here, "p", pairs.prompt(40))
    # the other rank has it, unless it was told first that nothing is to be sent
    pairs.until(lambda: pairs.has_arrived(here, 1 - rank) or pairs.told(there, "unsent_prompts"), there)
    assert pairs.decode(here, "d", pairs.prompt(40)) == 0  # it does not wait for what the other rank has
    pairs.rest(there, here)
    pairs.until(lambda: inbox(here, 1 - rank).arena.used_bytes == 0)
    assert held is not None


def test_a_load_of_what_went_is_computed(pairs):
    """It goes between the scheduler's choice and the worker's: its blocks have failed."""
    there, here = pairs.engine(), pairs.engine()
    pairs.prefill(there, here, "p", pairs.prompt(40))
    claim = inbox(here).claim
    inbox(here).claim = lambda digest: inbox(here).forget() or claim(digest)
    pairs.decode(here, "d", pairs.prompt(40))
    pairs.rest(there, here)
    assert counter(here, "failed_blocks") == 10
    assert counter(here, "loaded_blocks") == 0


def test_a_prefill_engine_that_ends_on_the_way_costs_the_computation(pairs):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    pairs.add(here, "d", pairs.prompt(40), {"do_remote_prefill": True})
    pairs.add(there, "p", pairs.prompt(40), pairs.asks(here), 1)
    for _ in range(3):  # of eight that compute the prompt
        there.step()
    pairs.until(lambda: inbox(here)._counts.num_bytes > 0)
    here.step()
    there.close()
    pairs.made.remove(there)
    pairs.rest(here)
    assert here.num_cached("d") == 0


@pytest.mark.matrix
def test_a_decode_engine_that_ends_on_the_way_costs_nothing_but_the_transfer(pairs):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    pairs.add(there, "p", pairs.prompt(40), pairs.asks(here), 1)
    for _ in range(3):  # of eight that compute the prompt
        there.step()
    pairs.until(lambda: inbox(here)._counts.num_bytes > 0)
    here.close()
    pairs.made.remove(here)
    pairs.rest(there)
    assert pairs.unsent(there) == 1


def test_a_decode_engine_that_comes_back_is_found(pairs):
    number = free_ports()
    there, here = pairs.engine(), pairs.engine(options={"port": number})
    pairs.prefill(there, here, "a", pairs.prompt(40))
    assert pairs.decode(here, "a", pairs.prompt(40)) == 39
    asks = pairs.asks(here)
    here.close()
    pairs.made.remove(here)
    here = pairs.engine(options={"port": number})
    pairs.add(there, "b", pairs.prompt(40, seed=1), asks, 1)
    pairs.finish(there, "b")
    assert pairs.decode(here, "b", pairs.prompt(40, seed=1)) == 39
    pairs.rest(there, here)


def test_sleep_takes_the_cache_away(pairs):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    for number, engine in enumerate((there, here)):
        pairs.prefill(there, here, f"p{number}", pairs.prompt(40, seed=number))
        pairs.rest(there)
        engine.engine.call("sleep")
        engine.engine.call("wake_up")
        assert pairs.decode(here, f"d{number}", pairs.prompt(40, seed=number)) == 39
    pairs.rest(there, here)


def test_reset_drops_what_came(pairs):
    there, here = pairs.engine(), pairs.engine(options={"wait_seconds": 0.3})
    pairs.prefill(there, here, "p", pairs.prompt(40))
    pairs.rest(there)
    here.run(request("other", pairs.prompt(8, seed=3)))
    assert here.engine.call("reset_prefix_cache", {"reset_connector": True})
    assert pairs.decode(here, "d", pairs.prompt(40)) == 0
    pairs.rest(here)
    pairs.until(lambda: inbox(here).arena.used_bytes == 0)


def test_more_memory_than_there_is_ends_the_start_with_a_sentence(pairs):
    pairs.options["buffer_bytes"] = 1 << 40
    worker = pairs.worker_side(pairs.config(kv_connector="push"), make_layout())
    with pytest.raises(ValueError, match="memory: lower buffer_bytes and send_buffer_bytes"):
        worker.register(FakeMemory(make_layout(), 0).views)
    worker.close()


def test_roles(pairs):
    sends, takes = pairs.engine(kv_role="producer"), pairs.engine(kv_role="consumer")
    params = pairs.prefill(sends, takes, "p", pairs.prompt(40))
    assert pairs.decode(takes, "d", pairs.prompt(40), params) == 39
    assert pairs.prefill(takes, takes, "q", pairs.prompt(40, seed=1)) is None
    assert pairs.decode(sends, "e", pairs.prompt(40, seed=2)) == 0
    pairs.rest(sends, takes)


def test_a_port_in_use_ends_the_start_with_a_sentence(pairs):
    there = pairs.engine()
    pairs.options["port"] = number = port(there)
    side = pairs.scheduler_side(pairs.config(kv_connector="push"), make_layout())
    said = rf"push connector cannot listen on 127\.0\.0\.1:{number}: Address already in use; choose another --kv-ip or "
    with pytest.raises(ValueError, match=said + r"--plugin\.push\.port$"):
        side.connect({0: there.workers.made[0].transfer.handshake()})
    side.close()


def test_workers_on_another_machine_are_refused(pairs):
    there = pairs.engine()
    hello = decode(there.workers.made[0].transfer.handshake(), Hello)
    side = pairs.scheduler_side(pairs.config(kv_connector="push"), make_layout())
    with pytest.raises(ValueError, match="all on one machine"):
        side.connect({0: encode(structs.replace(hello, machine="another"))})
    side.close()


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(2, 30))])
def test_random_lives(pairs, seed):
    """Prompts through two prefill engines and a small decode engine, with preemptions, aborts and broken steps."""
    draw = random.Random(seed)
    layout = make_layout(num_blocks=44, windows=(0, 6))
    here = pairs.random_life(draw, layout, (7, 64))
    assert counter(here, "loaded_blocks") > 0


def test_many_engines_are_served_in_turn(pairs, monkeypatch):
    monkeypatch.setattr(push_lanes, "_MAX_LANES", 2)
    there, takers = pairs.engine(), [pairs.engine() for _ in range(4)]
    lanes = there.workers.made[0].transfer.inner._lanes._lanes
    for number, here in enumerate(takers * 2):
        prompt = pairs.prompt(40, seed=number)
        pairs.prefill(there, here, f"p{number}", prompt)
        assert pairs.decode(here, f"d{number}", prompt) == 39
        pairs.until(lambda: all(lane.idle for lane in lanes.values()))  # one of which has the next one's room
    pairs.rest(there, *takers)


def test_an_engine_that_is_silent_is_not_asked_again_for_a_while(monkeypatch):
    """Also one that lets itself be met: else each prompt would wait for it as long as the first."""
    calls, ends = [], []

    class Silent:
        def send(self, message, seconds):
            pass

        def receive(self, kind, seconds):
            raise PeerError("no answer in time")

    def connect(place, secret, meet, seconds):
        calls.append(place)
        ends.extend(socket.socketpair())
        return ends[-1], Silent()

    monkeypatch.setattr(push_lane, "connect", connect)
    facts = Facts(1, "model", 4, "", 1, 1, "")
    lanes = Lanes(Stream(), b"", facts, 0, timeout=1, retry=60)
    parcels = [Parcel(f"r{number}", Goal("127.0.0.1", 1, bytes(32), 4)) for number in range(3)]
    for parcel in parcels:
        lanes.begin(parcel)
    unsent, deadline = [], time.monotonic() + SECONDS
    while len(unsent) < len(parcels) and time.monotonic() < deadline:
        unsent += lanes.take().unsent
    assert sorted(unsent) == ["r0", "r1", "r2"]
    assert len(calls) == 1
    lanes.close()
    for end in ends:
        end.close()


@pytest.mark.parametrize("host", ["::1%" + "a" * 300, "::1%\ud800"], ids=["long", "surrogate"])
def test_an_address_that_cannot_be_looked_up_costs_its_own_prompts_only(host):
    """A request may name it where a network of IPv6 is allowed. It ended the lane's thread, which kept the blocks."""
    lanes = Lanes(Stream(), b"", Facts(1, "model", 4, "", 1, 1, ""), 0, timeout=SECONDS, retry=0)
    unsent, deadline = [], time.monotonic() + SECONDS
    for name in ("r0", "r1"):
        lanes.begin(Parcel(name, Goal(host, 1, bytes(32), 4)))
        while name not in unsent:
            assert time.monotonic() < deadline
            unsent += lanes.take().unsent
    assert all(lane.lives for lane in lanes._lanes.values())
    lanes.close()


def test_blocks_for_more_engines_than_can_be_sent_to_at_a_time_are_refused(monkeypatch, caplog):
    """Those to which blocks are on their way keep their lanes, also while they are only being met."""
    may_meet, calls, ends = threading.Event(), [], []

    class Willing:
        def send(self, message, seconds):
            pass

        def receive(self, kind, seconds):
            return Ready()

    def connect(place, secret, meet, seconds):
        calls.append(place)
        assert may_meet.wait(SECONDS)
        ends.extend(socket.socketpair())
        return ends[-1], Willing()

    def until(done):
        deadline = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < deadline
            time.sleep(0.001)

    monkeypatch.setattr(push_lane, "connect", connect)
    monkeypatch.setattr(push_lanes, "_MAX_LANES", 2)
    lanes = Lanes(Stream(), b"", Facts(1, "model", 4, "", 1, 1, ""), 0, timeout=1, retry=60)
    parcels = [Parcel(f"r{number}", Goal("127.0.0.1", number, bytes(32), 4)) for number in (1, 2, 3, 4)]
    for parcel in parcels[:2]:
        lanes.begin(parcel)
    until(lambda: len(calls) == 2)
    lanes.begin(parcels[2])
    assert parcels[2].over
    lanes.end(parcels[2])
    lanes.drop(parcels[2])
    assert lanes.take().unsent == ["r3"]
    assert "no KV blocks go to the engine at 127.0.0.1:3: they go to 2 others" in caplog.text
    may_meet.set()
    until(lambda: all(parcel.ready is not None for parcel in parcels[:2]))
    lanes.end(parcels[0])
    until(lambda: parcels[0].over)

    def begins_now():
        lanes.begin(parcels[3])
        return not parcels[3].over

    until(lambda: begins_now() or setattr(parcels[3], "over", False))
    until(lambda: parcels[3].ready is not None)
    assert sorted(calls) == [("127.0.0.1", number) for number in (1, 2, 4)]
    assert not parcels[1].over, "it had a lane all the time"
    lanes.close()
    for end in ends:
        end.close()


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("giving", [0, 1])
def test_engines_that_share_experts_send_to_one_another(pairs, giving, ranks):
    """The worker of the second is not the first one of the mesh, but of its engine."""
    experts = {"data_parallel_size": 2, "enable_expert_parallel": True}
    sends, takes = (pairs.engine(ranks=ranks, data_parallel_rank=rank, **experts) for rank in (giving, 1 - giving))
    params = pairs.prefill(sends, takes, "p", pairs.prompt(40))
    assert pairs.decode(takes, "d", pairs.prompt(40), params) == 39
    pairs.rest(sends, takes)
