"""Two engines, one of which writes the blocks of prompts to the other through Mooncake, once that has asked."""

from __future__ import annotations

import contextlib
import logging
import queue
import re
import socket
import sys
import threading
import time
import types

import httpx
import pytest

from frame.plugins.connectors.blocks.wire import PeerError
from frame.plugins.connectors.mooncake import bootstrap as mooncake_bootstrap, scheduler as mooncake
from frame.plugins.connectors.mooncake.bootstrap import Source, Want, ask
from frame.plugins.connectors.mooncake.options import MooncakeOptions
from frame.plugins.connectors.push.facts import Facts
from frame.plugins.connectors.push.wire import Ready
from frame.testing import ConnectorSuite
from frame.testing.connector_states_suite import STATES
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from frame.testing.fake_memory import FakeMemory
from tests.connectors.mooncake_pairs import MooncakePairs, bootstrap, lacks, use_fake
from tests.connectors.push_pairs import counter as push_counter, inbox, moved

SHAPES = ConnectorSuite.layouts
QUICK = ("full and sliding", "groups of unequal blocks", "states beside windows")


def counter(engine, name):
    return push_counter(engine, name, "mooncake")


@pytest.fixture
def fake(monkeypatch):
    return use_fake(monkeypatch)


@pytest.fixture
def pairs(tmp_path, fake):
    made = MooncakePairs(tmp_path)
    yield made
    made.close()


@pytest.fixture(params=["fake", "real"])
def either(request, tmp_path, monkeypatch):
    """With the real transfer engine too, where it is."""
    if request.param == "fake":
        use_fake(monkeypatch)
    elif (reason := lacks()) is not None:
        pytest.skip(reason)
    made = MooncakePairs(tmp_path)
    yield made
    made.close()


@pytest.mark.parametrize(
    "shape", [pytest.param(SHAPES[name], marks=() if name in QUICK else pytest.mark.matrix, id=name) for name in SHAPES]
)
def test_all_tokens_of_prompts_but_the_last_travel(either, shape):
    layout = make_layout(**shape)
    there, here = either.engine(layout), either.engine(layout)
    for number, length in enumerate((22, 40, 17, 33, 3)):
        prompt = either.prompt(length, seed=number)
        either.prefill(there, here, f"p{number}", prompt)
        last = moved(layout, length)
        assert either.decode(here, f"d{number}", prompt, either.takes(there)) == last
    either.rest(there, here)
    assert counter(here, "received_bytes") == either.told(there, "sent_bytes") > 0
    assert counter(here, "failed_blocks") == 0
    assert inbox(here).arena.used_bytes == 0


@pytest.mark.parametrize("first", ["prefill", "decode"])
@pytest.mark.parametrize("steps", [0, 4, pytest.param(30, marks=pytest.mark.matrix)])
def test_both_are_asked_at_once_or_one_before_the_other(either, first, steps):
    there, here = either.engine(max_num_batched_tokens=5), either.engine()
    prompt = either.prompt(40)
    legs = [(there, "p", either.asks(here), 1), (here, "d", either.takes(there), 8)]
    for engine, name, params, count in legs if first == "prefill" else reversed(legs):
        either.add(engine, name, prompt, params, count)
        for _ in range(steps):
            engine.step()
            time.sleep(0.0005)
    either.rest(there, here)
    assert here.num_cached("d") == 39


def test_who_asks_first_gets_blocks_while_the_prompt_is_computed(pairs, fake):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    pairs.add(here, "d", pairs.prompt(40), pairs.takes(there))
    pairs.until(lambda: there.connector.inner.sends._wants, here)
    pairs.add(there, "p", pairs.prompt(40), pairs.asks(here), 1)
    for _ in range(3):  # of eight that compute the prompt
        there.step()
    pairs.until(lambda: fake.writes)
    assert not there.ended("p")
    pairs.rest(there, here)
    assert here.num_cached("d") == 39


def test_two_ranks_each_write_their_own(either):
    layout = make_layout(ranks=2)
    there, here = either.engine(layout, ranks=2), either.engine(layout, ranks=2)
    either.prefill(there, here, "p", either.prompt(40))
    assert either.decode(here, "d", either.prompt(40), either.takes(there)) == 39
    either.rest(there, here)


def test_a_proxy_that_goes_from_one_to_the_other_gets_parameters(pairs):
    there, here = pairs.engine(), pairs.engine()
    params = pairs.prefill(there, here, "p", pairs.prompt(40))
    assert params == pairs.takes(there)
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 39
    pairs.rest(there, here)


def test_who_has_the_prompt_frees_the_prefill_side(pairs):
    there, here = pairs.engine(), pairs.engine()
    here.run(request("before", pairs.prompt(40)))
    pairs.prefill(there, here, "p", pairs.prompt(40))
    assert there.held
    assert pairs.decode(here, "d", pairs.prompt(40), pairs.takes(there)) == 36
    pairs.rest(there, here)
    assert pairs.told(there, "sent_bytes") == 0


def test_who_is_aborted_frees_the_prefill_side(pairs):
    there, here = pairs.engine(), pairs.engine(max_num_seqs=1)
    pairs.add(here, "runs", pairs.prompt(20, seed=5), None, 60)
    for _ in range(3):
        here.step()
    pairs.prefill(there, here, "p", pairs.prompt(40))
    pairs.add(here, "d", pairs.prompt(40), pairs.takes(there))
    here.step()
    here.engine.abort(["d"])
    pairs.until(lambda: not there.busy, there, here)
    assert there.engine.stats().kv_usage == 0


@pytest.mark.parametrize("first", ["p", "d"])
@pytest.mark.parametrize(
    ("shape", "settings"),
    [({}, {"options": {"max_held_share": 0.01}}), (STATES["states"], {"enable_chunked_prefill": False})],
    ids=["held", "states"],
)
def test_nobody_waits_for_what_the_prefill_engine_does_not_keep(pairs, shape, settings, first):
    """Of a prompt that is computed in one step no copy of the state is kept."""
    layout = make_layout(**shape)
    there, here = pairs.engine(layout, **settings), pairs.engine(layout)
    if first == "d":
        pairs.add(here, "d", pairs.prompt(22), pairs.takes(there))
        pairs.until(lambda: there.connector.inner.sends._wants, here)
    assert pairs.prefill(there, there, "p", pairs.prompt(22)) is None
    if first == "p":
        pairs.add(here, "d", pairs.prompt(22), pairs.takes(there))
    pairs.until(lambda: here.ended("d"), there, here)
    assert here.num_cached("d") == 0
    pairs.rest(there, here)


def test_who_asks_while_the_prompt_ends_that_is_not_kept_is_told(pairs):
    there, here = pairs.engine(options={"max_held_share": 0.01}), pairs.engine()
    pairs.add(here, "d", pairs.prompt(22), pairs.takes(there))
    sends = there.connector.inner.sends
    keep = sends._keep

    def keeps(*arguments):
        pairs.until(lambda: sends._wants, here)
        return keep(*arguments)

    sends._keep = keeps
    assert pairs.prefill(there, there, "p", pairs.prompt(22)) is None
    pairs.until(lambda: here.ended("d"), there, here)
    assert here.num_cached("d") == 0
    pairs.rest(there, here)


def test_a_prompt_that_was_not_kept_once_may_be_kept_later(pairs):
    there, here = pairs.engine(options={"max_held_share": 0.12}), pairs.engine()
    pairs.prefill(there, here, "first", pairs.prompt(22))  # of 63 blocks it keeps 6, and no more are
    assert pairs.prefill(there, here, "p", pairs.prompt(22, seed=1)) is None
    assert pairs.decode(here, "first", pairs.prompt(22), pairs.takes(there)) == 21
    pairs.rest(there, here)
    assert pairs.prefill(there, here, "again", pairs.prompt(22, seed=1)) is not None
    assert pairs.decode(here, "d", pairs.prompt(22, seed=1), pairs.takes(there)) == 21
    pairs.rest(there, here)


def test_blocks_that_nobody_wants_expire(pairs):
    there = pairs.engine(options={"expiry_seconds": 1})
    pairs.prefill(there, there, "p", pairs.prompt(40))
    assert there.held == ["p"]
    pairs.rest(there)


def test_a_write_that_fails_costs_the_computation(pairs, fake):
    there, here = pairs.engine(), pairs.engine()
    fake.broken = True
    pairs.prefill(there, here, "p", pairs.prompt(40))
    assert pairs.decode(here, "d", pairs.prompt(40), pairs.takes(there)) == 0
    pairs.rest(there, here)
    assert pairs.unsent(there) == 1
    assert not fake.writes


def test_memory_is_kept_while_a_sender_may_write_to_it(pairs, fake):
    """Its request is gone, but the other engine does not know: nobody else gets the memory before it has ended."""
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    pairs.add(here, "d", pairs.prompt(40), pairs.takes(there))
    pairs.until(lambda: there.connector.inner.sends._wants, here)
    pairs.add(there, "p", pairs.prompt(40), pairs.asks(here), 1)
    for _ in range(3):  # of eight that compute the prompt
        there.step()
    pairs.until(lambda: fake.writes)
    here.engine.abort(["d"])
    here.run(request("other", pairs.prompt(8, seed=3)))
    assert inbox(here).claim(b"") is None
    assert inbox(here)._prompts == {}
    assert inbox(here).arena.used_bytes > 0
    pairs.rest(there)
    pairs.until(lambda: inbox(here).arena.used_bytes == 0)


def test_memory_is_kept_for_a_while_when_a_sender_is_gone(pairs, fake):
    there, here = pairs.engine(max_num_batched_tokens=5), pairs.engine()
    pairs.add(here, "d", pairs.prompt(40), pairs.takes(there))
    pairs.until(lambda: there.connector.inner.sends._wants, here)
    pairs.add(there, "p", pairs.prompt(40), pairs.asks(here), 1)
    for _ in range(3):  # of eight that compute the prompt
        there.step()
    pairs.until(lambda: fake.writes)
    there.close()
    pairs.made.remove(there)
    pairs.until(lambda: here.ended("d"), here)
    here.check("d")
    assert inbox(here).arena.used_bytes > 0
    pairs.given_back(here, inbox(here).arena)


def test_parameters_that_are_not_right_cost_the_computation(pairs):
    there, here = pairs.engine(make_layout(num_blocks=200), options={"expiry_seconds": 1}), pairs.engine()
    for number, changes in enumerate(
        [
            {"remote_engine_id": "another"},
            {"remote_bootstrap_addr": "http://127.0.0.1:1"},
            {"remote_bootstrap_addr": "https://127.0.0.1:8998"},
            {"remote_bootstrap_addr": "http://127.0.0.1:99999"},
            {"remote_bootstrap_addr": "http://127.0.0.1:8998/other"},
            {"remote_bootstrap_addr": 5},
            {"remote_bootstrap_addr": None},
            {"remote_engine_id": 5},
        ]
    ):
        prompt = pairs.prompt(40, seed=number)
        assert pairs.prefill(there, here, f"p{number}", prompt) is not None
        assert pairs.decode(here, f"d{number}", prompt, pairs.takes(there, **changes)) == 0
    pairs.rest(there, here)


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({}, "remote_bootstrap_addr is missing"),
        ({"remote_bootstrap_addr": 5}, "remote_bootstrap_addr must be an address such as http://HOST:PORT, got 5"),
        (
            {"remote_bootstrap_addr": "http://a:1/b"},
            "remote_bootstrap_addr must be an address such as http://HOST:PORT",
        ),
        ({"remote_engine_id": 5}, "remote_engine_id must be a text of at most 512 characters, got 5"),
        (
            {"bootstrap_server_host": "a"},
            "bootstrap_server_host and bootstrap_server_port must be an address such as http://HOST:PORT, got "
            "'http://a:None'",
        ),
    ],
)
def test_the_parameter_that_is_wrong_is_named(params, said):
    with pytest.raises(ValueError, match=f"^{re.escape(said)}"):
        Source.of(params)


def test_a_host_that_is_none_of_the_peers_is_not_asked(pairs, caplog):
    there, here = pairs.engine(options={"expiry_seconds": 1}), pairs.engine()
    pairs.prefill(there, here, "p", pairs.prompt(40))
    params = pairs.takes(there, remote_bootstrap_addr=f"http://localhost:{bootstrap(there)}")
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    said = "'localhost' is none of the hosts of --plugin.mooncake.peers (none are listed, so 127.0.0.1, the --kv-ip"
    assert said in caplog.text
    pairs.rest(there, here)


def test_the_older_names_of_the_address_are_taken(pairs):
    there, here = pairs.engine(), pairs.engine()
    pairs.prefill(there, here, "p", pairs.prompt(40))
    params = pairs.takes(there, bootstrap_server_host="127.0.0.1", bootstrap_server_port=bootstrap(there))
    del params["remote_bootstrap_addr"]
    assert pairs.decode(here, "d", pairs.prompt(40), params) == 39
    pairs.rest(there, here)


def test_what_proxies_ask_for_is_answered(pairs):
    there = pairs.engine()
    address = f"http://127.0.0.1:{bootstrap(there)}"
    found = httpx.get(f"{address}/query", timeout=5).json()
    assert found["0"]["engine_id"] == "engine-under-test"
    assert found["0"]["worker_addr"]["0"]["0"].startswith("tcp://127.0.0.1:")
    assert httpx.get(f"{address}/other", timeout=5).status_code == 404
    with socket.create_connection(("127.0.0.1", bootstrap(there)), timeout=5) as raw:
        raw.sendall(b"x" * 20_000)
        assert raw.recv(100) == b""


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"[]",
        b"[" * 50_000,
        b'{"0": {}}',
        b'{"0": {"engine_id": "e", "worker_addr": {"0": {"0": "tcp://10.0.0.1"}}}}',
        b'{"0": {"engine_id": "e", "worker_addr": {"0": {"0": 5}}}}',
        b'{"0": {"engine_id": "e", "worker_addr": {"0": {"0": "tcp://x:99999"}}}}',
    ],
)
def test_answers_that_say_nothing_are_refused(body):
    listener = socket.create_server(("127.0.0.1", 0))

    def answer():
        caller, _ = listener.accept()
        with caller:
            caller.recv(1000)
            caller.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%b" % (len(body), body))

    thread = threading.Thread(target=answer)
    thread.start()
    facts = Facts(1, "m", 4, "g", 1, 1, "f")
    source = Source("e", "127.0.0.1", listener.getsockname()[1])
    with pytest.raises(PeerError):
        ask(source, b"secret", facts, Want(b"d" * 32, "127.0.0.1", 1), 5.0)
    thread.join()
    listener.close()


def test_an_address_that_cannot_be_looked_up_is_an_engine_that_is_not_there():
    source = Source("e", "::1%" + "a" * 300, 1)
    with pytest.raises(PeerError, match="no answer"):
        ask(source, b"secret", Facts(1, "m", 4, "g", 1, 1, "f"), Want(b"d" * 32, "127.0.0.1", 1), 5.0)


def test_engines_that_do_not_know_the_secret_or_differ_get_nothing(pairs, caplog, tmp_path):
    there = pairs.engine(options={"expiry_seconds": 2})
    (tmp_path / "other").write_text("another secret of the tests")
    stranger = pairs.engine(options={"secret_file": str(tmp_path / "other")})
    other = pairs.engine(make_layout(model="other"))
    pairs.prefill(there, there, "p", pairs.prompt(40))
    for number, here in enumerate((stranger, other)):
        assert pairs.decode(here, f"d{number}", pairs.prompt(40), pairs.takes(there)) == 0
    assert "did not accept the secret" in caplog.text
    assert "the engines differ in the model" in caplog.text
    assert not there.connector.inner.sends._wants
    pairs.rest(there, stranger, other)


def test_without_a_trusted_network_it_does_not_start(pairs):
    pairs.options["trusted_network"] = False
    with pytest.raises(
        ValueError, match="Mooncake listens on all addresses of this machine, and lets whoever connects"
    ):
        pairs.scheduler_side(pairs.config(kv_connector="mooncake"), make_layout())


def test_it_says_in_one_line_that_it_listens(pairs, caplog):
    caplog.set_level(logging.INFO)
    pairs.engine()
    lines = [record.message for record in caplog.records if "listens on all addresses" in record.message]
    assert len(lines) == 1


def test_without_the_library_the_start_ends_with_a_sentence(pairs, monkeypatch):
    monkeypatch.setitem(sys.modules, "mooncake.engine", None)
    worker = pairs.worker_side(pairs.config(kv_connector="mooncake"), make_layout())
    with pytest.raises(
        ValueError, match=r"needs Mooncake .*pip install 'frame-llm\[mooncake\]', and the library libibverbs"
    ):
        worker.register(FakeMemory(make_layout(), 0).views)
    worker.close()


def test_options_that_are_wrong_are_named():
    with pytest.raises(ValueError, match="protocol"):
        MooncakeOptions(protocol="other")


def test_what_is_wanted_is_bounded(pairs):
    sends = pairs.engine().connector.inner.sends
    for number in range(5000):
        sends.want(Want(number.to_bytes(32, "little"), "127.0.0.1", 1))
        sends.lacks(number.to_bytes(32, "little"))
    assert len(sends._wants) == 4096
    assert len(sends._lacks) == 1024


def test_what_was_to_be_asked_of_a_silent_engine_is_not_asked_while_it_rests(pairs, monkeypatch):
    """Questions that wait for a thread must not each take as long as the one without an answer."""
    asked = []

    def silent(source, *rest):
        asked.append(source)
        raise PeerError("no answer in time")

    monkeypatch.setattr(mooncake, "ask", silent)
    pairs.options["retry_seconds"] = 60
    side = pairs.engine().connector.inner
    source, want = Source("", "127.0.0.1", 1), Want(bytes(32), "127.0.0.1", 1)
    assert [side._tell(source, want) for _ in range(3)] == [False] * 3
    assert len(asked) == 1


def test_an_engine_that_answers_byte_by_byte_has_one_limit_for_all_it_is_asked():
    """Each byte came in time; a thread would have read 64 KiB of head."""
    listener, over = socket.create_server(("127.0.0.1", 0)), threading.Event()

    def drip():
        caller, _ = listener.accept()
        with caller, contextlib.suppress(OSError):
            caller.recv(1000)
            caller.sendall(b"HTTP/1.1 200 OK\r\nX: ")
            while not over.wait(0.05):
                caller.sendall(b"x")

    thread, stop = threading.Thread(target=drip), threading.Timer(20, over.set)
    thread.start()
    stop.start()
    source = Source("e", "127.0.0.1", listener.getsockname()[1])
    with pytest.raises(PeerError, match="no answer"):
        ask(source, b"secret", Facts(1, "m", 4, "g", 1, 1, "f"), Want(b"d" * 32, "127.0.0.1", 1), 0.3)
    assert not over.is_set(), "it was waited for until it hung up"
    stop.cancel()
    over.set()
    thread.join()
    listener.close()


def test_all_answers_together_come_within_one_limit(monkeypatch):
    """Each is given what the others have left."""
    given = []

    class Channel:
        def send(self, message, seconds):
            given.append(seconds)
            clock.now += 1

        def receive(self, kind, seconds):
            given.append(seconds)
            clock.now += 1
            return Ready()

    clock = types.SimpleNamespace(now=0.0)
    monkeypatch.setattr(mooncake_bootstrap, "time", types.SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(mooncake_bootstrap, "_query", lambda source, left: 1)
    monkeypatch.setattr(socket, "create_connection", lambda place, timeout: contextlib.nullcontext())
    monkeypatch.setattr(mooncake_bootstrap, "call", lambda connection, secret, seconds: Channel())
    facts, want = Facts(1, "m", 4, "g", 1, 1, "f"), Want(b"d" * 32, "127.0.0.1", 1)
    assert ask(Source("e", "127.0.0.1", 1), b"secret", facts, want, 10.0)
    assert given == [10.0, 9.0, 8.0, 7.0]
    given.clear()
    with pytest.raises(PeerError, match=r"no answer within 2\.5 s"):
        ask(Source("e", "127.0.0.1", 1), b"secret", facts, want, 2.5)
    assert given == [2.5, 1.5, 0.5]


def test_silent_ports_leave_other_hosts_their_threads(pairs, monkeypatch):
    over, asked = threading.Event(), queue.SimpleQueue()

    def silent(source, *rest):
        asked.put(source.host)
        if source.host == "10.0.0.1":
            assert over.wait(60)
            raise PeerError("no answer in time")
        return True

    monkeypatch.setattr(mooncake, "ask", silent)
    side, want = pairs.engine().connector.inner, Want(bytes(32), "127.0.0.1", 1)
    told = [side._submit(Source("", "10.0.0.1", port), want) for port in range(1, 60)]
    try:
        assert side._submit(Source("", "10.0.0.2", 1), want).result(60)
    finally:
        over.set()
    assert not any(one.result(60) for one in told)


def test_threads_that_cannot_be_started_cost_one_computation(pairs, monkeypatch, caplog):
    there, here = pairs.engine(), pairs.engine()
    params, side = pairs.prefill(there, here, "p", pairs.prompt(40)), here.connector.inner

    def refuse(place, work):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(side._askers, "submit", refuse)
        assert pairs.decode(here, "d", pairs.prompt(40), params) == 0
    assert [line for line in caplog.messages if "a prefill engine is not asked: can't start new thread" in line]
