"""Who may read a prefill engine's blocks, for how long, and what passes between two engines: without agents."""

from __future__ import annotations

import random
import socket
import threading
import time
from array import array

import pytest
from hypothesis import given, settings, strategies as st
from msgspec.structs import replace

from frame.interfaces import encode
from frame.plugins.connectors.blocks.wire import Challenge, PeerError, send
from frame.plugins.connectors.nixl.holds import MAX_RENEWALS, Holds
from frame.plugins.connectors.nixl.links import Links, Source
from frame.plugins.connectors.nixl.listener import NixlListener
from frame.plugins.connectors.nixl.messages import AgentFacts, LayerMemory, Notice, digest
from frame.plugins.connectors.nixl.options import NixlOptions, is_loopback
from frame.plugins.connectors.nixl.shapes import VERSION, BlockShape, Facts, GroupShape, LayerShape
from frame.plugins.connectors.nixl.wire import Channel, Done, Granted, Lease, Release, answer_call, call
from frame.testing.fake_cache import make_layout

CONTENT, TOKENS = b"content", array("i", range(20))
SHOWN = digest(CONTENT, TOKENS)
BLOCKS = [[1, 2, 3, 4, 5]]
BLOCK = BlockShape((2, 4, 1, 8), (0, 1, 2, 3), "float32", 4, 1, 2)
FACTS = Facts(2, "m", "", 4, [GroupShape(4, "all", 0)], [BLOCK], [[LayerShape("a", 0, 0, 0, 1, 1)]])


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def make_holds(max_blocks=100, seconds=10.0):
    clock = Clock()
    holds = Holds(make_layout(), seconds, max_blocks, clock)
    assert holds.add("a", CONTENT, TOKENS, BLOCKS)
    return holds, clock


def test_blocks_go_back_once_all_readers_have_read_them():
    holds, _ = make_holds()
    ticket, blocks, seconds = holds.lease("a", 20, SHOWN)
    assert (blocks, seconds) == (BLOCKS, 10.0)
    for name, reader, count in ((ticket, 0, 3), (ticket, 0, 3), (ticket, 3, 3), (ticket, 1, 1), (ticket, 2, 3)):
        holds.read(Notice(name, reader, count))
    holds.read(Notice(b"unknown", 1, 3))
    assert holds.collect() == []
    holds.read(Notice(ticket, 1, 3))
    assert holds.collect() == ["a"]
    assert (holds.collect(), holds.num_blocks) == ([], 0)
    assert holds.lease("a", 20, SHOWN) is None


def test_no_reader_ends_the_lease_of_another():
    holds, _ = make_holds()
    one, other = (holds.lease("a", 20, SHOWN)[0] for _ in range(2))
    holds.read(Notice(one, 0, 1))
    holds.release("a", 20, SHOWN, one)
    assert holds.collect() == []
    holds.release("a", 20, SHOWN, other)
    assert holds.collect() == ["a"]


def test_only_tokens_that_the_caller_knows_are_given():
    holds, _ = make_holds()
    assert holds.lease("a", 8, digest(CONTENT, TOKENS[:8]))[1] == [[1, 2]]
    wrong = digest(b"other", TOKENS)
    for name, count, shown in (("b", 20, SHOWN), ("a", 20, wrong), ("a", 16, SHOWN), ("a", 0, digest(CONTENT, []))):
        assert holds.lease(name, count, shown) is None
        holds.release(name, count, shown, b"")
    assert holds.lease("a", 7, digest(CONTENT, TOKENS[:7]))[1] == [[1, 2]]
    for count in (21, 24, -4):
        assert holds.lease("a", count, digest(CONTENT, TOKENS[:count])) is None
    assert holds.collect() == []


def test_a_lease_ends_by_the_clock_and_renewals_are_bounded():
    holds, clock = make_holds()
    clock.now += 9
    ticket = holds.lease("a", 20, SHOWN)[0]
    for _ in range(MAX_RENEWALS):
        clock.now += 9
        assert holds.collect() == []
        assert holds.renew(ticket) == 10.0
    assert holds.renew(ticket) is None
    assert holds.renew(b"another") is None
    clock.now += 10
    assert holds.lease("a", 20, SHOWN) is None
    assert holds.collect() == ["a"]
    assert holds.renew(ticket) is None


def test_a_reset_waits_for_readers():
    holds, _ = make_holds()
    ticket = holds.lease("a", 20, SHOWN)[0]
    assert not holds.clear()
    holds.read(Notice(ticket, 0, 1))
    holds.add("b", CONTENT, TOKENS, BLOCKS)
    assert holds.clear()
    assert holds.lease("b", 20, SHOWN) is None
    assert sorted(holds.collect()) == ["a", "b"]


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["lease", "renew", "read", "release", "wait"]), st.floats(0, 12)), max_size=30)
)
def test_blocks_never_go_back_before_a_reader_takes_its_lease_for_ended(moves):
    """The reader counts from before it asked: at its end less a second the blocks are still here, or all was read."""
    holds, clock = make_holds()
    leases = {}  # ticket -> the end by the reader's count
    for move, length in moves:
        before = clock.now
        clock.now += length
        if move == "lease" and (granted := holds.lease("a", 20, SHOWN)) is not None:
            leases[granted[0]] = before + granted[2]
        for ticket in list(leases)[:1]:
            if move == "renew" and (more := holds.renew(ticket)) is not None:
                leases[ticket] = before + more
            if move in ("read", "release"):
                holds.read(Notice(ticket, 0, 1)) if move == "read" else holds.release("a", 20, SHOWN, ticket)
                del leases[ticket]
        if "a" in holds.collect():
            assert all(end <= clock.now for end in leases.values())
            return


def test_an_agent_may_not_say_too_much_of_itself():
    layer = LayerMemory(0, 1, 0, 1, 1)
    for changes in ({"metadata": bytes(1 << 20)}, {"layers": [layer] * 5000}, {"name": "n" * 300}):
        with pytest.raises(ValueError, match="more of itself"):
            AgentFacts(**{"name": "n", "metadata": b"", "memory": "DRAM", "layers": [layer], **changes})


def meet(caller_secret=b"s" * 16, listener_secret=b"s" * 16):
    one, other = socket.socketpair()
    found = {}

    def listen():
        try:
            found["channel"] = answer_call(other, listener_secret)
        except PeerError as error:
            found["error"] = error
            other.close()

    thread = threading.Thread(target=listen)
    thread.start()
    try:
        return one, other, call(one, caller_secret, 30), found
    except PeerError:
        one.close(), other.close()
        raise
    finally:
        thread.join()


def test_a_channel_carries_messages_both_ways():
    one, other, caller, found = meet()
    caller.send(Lease("a", 4, b"d"), 30)
    assert found["channel"].receive(Lease | Release, 30) == Lease("a", 4, b"d")
    found["channel"].send(Done(), 30)
    assert caller.receive(Done, 30) == Done()
    one.close(), other.close()


def test_neither_side_speaks_to_one_that_does_not_know_the_secret():
    with pytest.raises(PeerError, match="did not accept the secret"):
        meet(caller_secret=b"t" * 16)
    one, other = socket.socketpair()
    with one, other:  # a listener that says yes to everybody
        send(other, Challenge(VERSION, bytes(32)))
        threading.Timer(0.05, lambda: send(other, Done())).start()
        with pytest.raises(PeerError):
            call(one, b"s" * 16, 30)


def test_a_frame_that_was_changed_repeated_or_sent_back_is_refused():
    one, other, caller, found = meet()
    listener = found["channel"]
    caller.send(Lease("a", 4, b"d"), 30)
    raw = other.recv(1 << 16)
    for spoilt in (raw[:-1] + bytes([raw[-1] ^ 1]), raw[:8] + bytes([raw[8] ^ 1]) + raw[9:]):
        one.sendall(spoilt)
        with pytest.raises(PeerError):
            listener.receive(Lease, 30)
    one.sendall(raw)
    assert listener.receive(Lease, 30) == Lease("a", 4, b"d")
    one.sendall(raw)
    with pytest.raises(PeerError, match="was changed"):
        listener.receive(Lease, 30)
    other.sendall(raw)
    with pytest.raises(PeerError, match="was changed"):
        caller.receive(Lease, 30)
    one.close(), other.close()


def test_frames_are_bounded_before_they_are_read():
    one, other, _, found = meet()
    one.sendall((1 << 30).to_bytes(4, "little"))
    with pytest.raises(PeerError, match="at most"):
        found["channel"].receive(Lease, 30)
    one.close(), other.close()


def test_the_hosts_that_blocks_may_come_from():
    alone = NixlOptions(secret_file="x")
    assert alone.allows("127.0.0.1", "127.0.0.1")
    assert not alone.allows("10.0.0.1", "127.0.0.1")
    assert alone.allows("10.0.0.1", "10.0.0.1")
    several = NixlOptions(secret_file="x", peers=["10.1.0.0/16", "prefill.local"])
    assert [several.allows(host, "127.0.0.1") for host in ("10.1.2.3", "prefill.local")] == [True, True]
    assert not any(several.allows(host, "127.0.0.1") for host in ("10.2.0.1", "127.0.0.1", "prefill.local.evil", "::1"))
    with pytest.raises(ValueError, match="does not appear to be"):
        NixlOptions(secret_file="x", peers=["10.1.0/99"])


@pytest.mark.parametrize("zone", ["a" * 300, "\ud800", "eth0\nWARNING forged", "", "a/b"])
def test_behind_an_address_of_a_network_only_an_interface_is_named(zone):
    options = NixlOptions(secret_file="x", peers=["fe80::/10"])
    assert options.allows("fe80::1%eth0", "127.0.0.1")
    assert not options.allows(f"fe80::1%{zone}", "127.0.0.1")


def test_ucx_stays_on_a_loopback_address():
    options = NixlOptions(secret_file="x")
    assert options.backend_config("127.0.0.1") == options.backend_config("::1") == "NET_DEVICES=lo"
    assert options.backend_config("10.0.0.1") == ""
    assert NixlOptions(secret_file="x", ucx_config="TLS=tcp").backend_config("127.0.0.1") == "TLS=tcp"
    assert is_loopback("localhost")
    assert not is_loopback("example.org")


def test_a_channels_key_is_its_own():
    channels = [Channel(None, key, calls=True) for key in (b"a", b"b")]
    body = encode(Done())
    assert len({channel._tag(b"caller", number, body) for channel in channels for number in (0, 1)}) == 4


@pytest.fixture
def listener():
    def made(facts=FACTS, engine="engine", agents=list):
        holds, _ = make_holds()
        found = NixlListener("127.0.0.1", 0, secret=b"s" * 16, engine=engine, facts=facts, holds=holds, agents=agents)
        opened.append(found)
        return found

    opened = []
    yield made
    for one in opened:
        one.close()


def links(secret=b"s" * 16, facts=FACTS):
    return Links(secret, facts, timeout=30, retry=0)


def test_what_strangers_send_changes_nothing(listener):
    one, draw = listener(), random.Random(5)
    good = len(encode(Done())).to_bytes(4, "little")
    for number in range(60):
        with socket.create_connection(("127.0.0.1", one.port), timeout=30) as caller:
            caller.recv(1 << 12)
            caller.sendall(draw.choice((b"", good, b"\x20\x00\x00\x00")) + draw.randbytes(number))
    known = links()
    source = Source("engine", "a", "127.0.0.1", one.port)
    assert known.to(source).ask(Lease("a", 20, SHOWN), Granted).blocks == BLOCKS
    known.close()


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("the model .*: m at the prefill engine, n at", {"model": "n"}),
        ("the version of the protocol: 2 at the prefill engine, 3 at the decode engine", {"version": 3}),
        ("the number of layers that keep tokens: 1 at the prefill engine, 0 at", {"ranks": [[]]}),
        ("their layers: a at the prefill engine, b at", {"ranks": [[LayerShape("b", 0, 0, 0, 1, 1)]]}),
        ("the number of KV heads, of layer a: 1 at the", {"ranks": [[LayerShape("a", 0, 0, 0, 1, 2)]]}),
        ("how long tokens are kept, of layer a: all 0 at", {"groups": [GroupShape(4, "window", 3)]}),
        ("the element type of the KV cache .*: float32 at .*, int8", {"blocks": [replace(BLOCK, dtype="int8")]}),
        (
            "the axes of a block.*: 2xtokensxheadsx8 at .*, 2xtokensxheadsx9 at",
            {"blocks": [replace(BLOCK, shape=(2, 4, 1, 9))]},
        ),
        (
            "the block size, and neither is a multiple of the other: 4 at .*, 6 at",
            {"blocks": [replace(BLOCK, shape=(2, 6, 1, 8))], "groups": [GroupShape(6, "all", 0)]},
        ),
        ("what `deterministic` fixes .*: nothing at .*, 123 at", {"exact": "123"}),
    ],
)
def test_an_engine_that_does_not_fit_is_told_why_and_nothing_else(listener, name, changes, caplog):
    one = listener(agents=lambda: pytest.fail("a stranger was told of this engine's memory"))
    known = links(facts=replace(FACTS, **changes))
    for _ in range(3):
        with pytest.raises(PeerError, match=f"differ in {name}"):
            known.to(Source("engine", "a", "127.0.0.1", one.port)).ask(Lease("a", 20, SHOWN), Granted)
    assert caplog.text.count("prompts are computed here") == 1
    known.close()


def test_ids_that_clients_make_up_do_not_fill_the_log(listener, caplog):
    one, known = listener(), links()
    for number in range(20):
        with pytest.raises(PeerError, match="another engine"):
            known.to(Source(f"made up {number}", "a", "127.0.0.1", one.port)).ask(Lease("a", 20, SHOWN), Granted)
    assert caplog.text.count("prompts are computed here") == 1
    known.close()


def test_a_connection_that_ended_is_made_anew(listener):
    one, known = listener(), links()
    source = Source("engine", "a", "127.0.0.1", one.port)
    assert known.to(source).ask(Lease("a", 20, SHOWN), Granted).blocks == BLOCKS
    for caller in list(one._callers._open):
        caller.shutdown(socket.SHUT_RDWR)
    assert known.to(source).ask(Lease("a", 20, SHOWN), Granted).blocks == BLOCKS
    known.close()


def test_an_engine_that_never_answers_costs_its_deadline():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        known = Links(b"s" * 16, FACTS, timeout=0.2, retry=60)
        link = known.to(Source("engine", "a", *silent.getsockname()))
        start = time.monotonic()
        with pytest.raises(PeerError):
            link.ask(Lease("a", 20, SHOWN), Granted)
        assert time.monotonic() - start < 30
        with pytest.raises(PeerError, match="rests"):
            link.ask(Lease("a", 20, SHOWN), Granted)
        known.close()


@pytest.mark.parametrize("host", ["::1%" + "a" * 300, "::1%\ud800"], ids=["long", "surrogate"])
def test_an_address_that_cannot_be_looked_up_is_an_engine_that_is_not_there(host):
    known = links()
    with pytest.raises(PeerError, match="no connection"):
        known.to(Source("engine", "a", host, 1)).ask(Lease("a", 20, SHOWN), Granted)
    known.close()


def test_a_listener_that_nests_its_frames_deeply_is_an_engine_that_does_not_answer():
    """Its challenge is read before it has proved anything; what failed then silenced the connector at a renewal."""
    nested = b"\x81\xa1x" + b"\x91" * 3000 + b"\xc0"
    with socket.create_server(("127.0.0.1", 0)) as wrong:

        def answer():
            caller, _ = wrong.accept()
            with caller:
                caller.sendall(len(nested).to_bytes(4, "little") + nested)
                caller.recv(1)

        thread = threading.Thread(target=answer)
        thread.start()
        known = links()
        with pytest.raises(PeerError, match="not a Challenge"):
            known.to(Source("engine", "a", *wrong.getsockname())).ask(Lease("a", 20, SHOWN), Granted)
        known.close()
        thread.join()
