"""What a server of the lmcache connector can do wrong, and what it costs: its help, and never a token."""

from __future__ import annotations

import os
import random
import re
import socket
import threading
import time

import msgspec
import numpy as np
import pytest
from pydantic import ValidationError

from frame.core.config.flat import from_flat
from frame.core.plugin_host.offers import PluginError
from frame.core.plugin_host.registry import Registry
from frame.interfaces import encode
from frame.plugins.connectors.lmcache import transfers as lmcache_transfers
from frame.plugins.connectors.lmcache.lookup import Lookup, Lookups
from frame.plugins.connectors.lmcache.messages import Geometry, Prompt
from frame.plugins.connectors.lmcache.options import LMCacheOptions
from frame.plugins.connectors.lmcache.pool import HEADER, SharedPool, checksum, object_bytes
from frame.plugins.connectors.lmcache.transfers import Transfers
from frame.plugins.connectors.lmcache.wire import Client, LMCacheError
from frame.plugins.connectors.peer.options import Address
from frame.testing import make_setup
from frame.testing.connector_engines import ConnectorEngines
from frame.testing.engines import request
from frame.testing.fake_cache import make_layout
from tests.connectors.lmcache_server import OPERATIONS, FakeServer

SILENCE = FakeServer.SILENCE
GEOMETRY = Geometry(model="frame-test", chunk=4, grain=8, world=1, object_bytes=object_bytes(50))
UNIT_BYTES = 99  # of two objects, the second one shorter


@pytest.fixture
def server():
    made = FakeServer()
    yield made
    made.close()


class Case(ConnectorEngines):
    plugin = "lmcache"

    @pytest.fixture(autouse=True)
    def _server(self, _own_folder, server):
        self.server = server
        self.set()

    def set(self, **options):
        self.options = {"server": self.server.address, "lookup_seconds": 20, "retry_seconds": 0.1, **options}

    def found(self, prompt, **settings):
        """How many of the prompt's tokens a new engine gets from the server; its tokens are right."""
        engine = self.engine(**settings)
        engine.run(request("found", prompt))
        engine.check()
        engine.close()
        return engine.num_cached("found")

    def counters(self, engine):
        return {
            name.removeprefix("lmcache_"): value for name, value in engine.engine.stats().connector_counters.items()
        }


#: What the server gives instead of its answer; of an operation that asks for objects, wrong ones.
ANSWERS = {
    "silence": lambda found: SILENCE,
    "nothing": lambda found: b"\xc0",
    "garbage": lambda found: b"\xc1\xff",
    "another type": lambda found: "much",
    "negative": lambda found: -1,
    "huge": lambda found: 1 << 62,
    "deep": lambda found: b"\x91" * 5000,
    "pickle": lambda found: {"success": True, "data": b"cos\nsystem\n.", "context": {}},
    "no number": lambda found: [b"\xa1x", b"\x08", b"\xc0"],
    "one frame": lambda found: [b"\x01"],
    "many frames": lambda found: [b"\x01"] * 9,
    "large": lambda found: bytes(2 << 20),
}
OBJECTS = {
    "outside": {"offset": 1 << 40},
    "before": {"offset": -4096},
    "at the end": {"offset": (1 << 22) - 8},
    "longer": {"length": 1 << 20},
    "shorter": {"length": 1},
    "other values": {"dtype": "float16"},
    "others' place": {"offset": 0},
}


def changed(change):
    def answer(found):
        slots = [{**slot, **change} for slot in found["context"].get("slots", [])]
        return {**found, "context": {**found["context"], "slots": slots}}

    return answer


def fewer(found):
    return {**found, "context": {name: value[1:] for name, value in found["context"].items()}}


def other_chunks(found):
    return {**found, "context": {**found["context"], "chunk_indices": [9] * len(found["context"]["slots"])}}


CASES = [(name, what, answer) for name in OPERATIONS.values() for what, answer in ANSWERS.items()]
CASES += [
    (name, what, changed(change)) for name in ("prepare_store", "prepare_retrieve") for what, change in OBJECTS.items()
]
CASES += [("prepare_retrieve", "fewer", fewer), ("prepare_store", "fewer", fewer)]
CASES += [("prepare_store", "other chunks", other_chunks)]
CASES += [("register", what, lambda found, name=name: {**found, "shm_name": name}) for what, name in (
    ("no memory", ""), ("outside", "../../etc/passwd"), ("missing", "lmcache_l1_pool_none"))]  # fmt: skip
CASES += [("register", "larger than it is", lambda found: {**found, "pool_size": 1 << 40})]
QUICK = {"garbage", "outside", "others' place", "no memory"}
SILENT = {"get_chunk_size", "query_prefetch_status", "prepare_retrieve", "commit_store"}


class TestWrongAnswers(Case):
    @pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.matrix)])
    @pytest.mark.parametrize(
        ("operation", "answer"),
        [
            pytest.param(
                name,
                answer,
                id=f"{name}, {what}",
                marks=() if what in QUICK or (what == "silence" and name in SILENT) else pytest.mark.matrix,
            )
            for name, what, answer in CASES
        ],
    )
    def test_no_answer_changes_a_token(self, operation, answer, ranks):
        """Also of an engine that was at work before, and of one that comes after."""
        self.set(timeout_seconds=0.15, lookup_seconds=0.5)
        first = self.prompt(30)
        self.fill(first, ranks=ranks, layout=make_layout(ranks=ranks))
        self.set(timeout_seconds=0.15, lookup_seconds=0.5)
        engine = self.engine(ranks=ranks)
        engine.run(request("before", self.prompt(20, seed=1)))
        self.server.answers[operation] = answer
        engine.run(request("found", first), request("new", self.prompt(25, seed=2)))
        engine.check()
        engine.close()
        other = self.engine(ranks=ranks)
        other.run(request("found", first), request("new", self.prompt(25, seed=2)))
        other.check()
        other.close()


class TestRandomFaults(Case):
    @pytest.mark.parametrize(
        "seed", [*range(4), *(pytest.param(seed, marks=pytest.mark.matrix) for seed in range(4, 200))]
    )
    def test_random_lives_with_random_answers(self, seed):
        """Requests, aborts and engines that come and go, while answers are lost, late, of other kinds or wrong."""
        draw = random.Random(seed)
        ranks = draw.choice([1, 2])
        windows = draw.choice([(0,), (0, 6), (5,)])
        layout = make_layout(num_blocks=80 * len(windows), windows=windows, ranks=ranks)
        share = draw.choice([0.02, 0.1, 0.5])

        def answer(found):
            if draw.random() >= share:
                return found
            if isinstance(found, dict) and isinstance(found.get("context"), dict) and draw.random() < 0.5:
                return draw.choice([changed(draw.choice(list(OBJECTS.values()))), fewer])(found)
            if draw.random() < 0.2 and self.server.objects:
                self.server.damage(draw.choice(list(self.server.objects)))
                return found
            return draw.choice(list(ANSWERS.values()))(found)

        self.server.answers = dict.fromkeys(OPERATIONS.values(), answer)
        self.set(timeout_seconds=0.05, lookup_seconds=0.1, retry_seconds=draw.choice([0, 0.02]))
        for life in range(2):
            engine = self.engine(layout, ranks=ranks, max_num_batched_tokens=draw.choice([5, 16, 64]))
            gone = set()
            for number in range(8):
                name = f"{life}-{number}"
                prompt = self.prompt(draw.randrange(1, 50), seed=draw.randrange(3))
                engine.add(request(name, prompt, draw.randrange(1, 9)))
                for _ in range(draw.randrange(4)):
                    engine.step()
                if draw.random() < 0.2:
                    gone.add(name)
                    engine.engine.abort([name])
            engine.run()
            engine.check(*(set(engine.requests) - gone))
            engine.close()


class TestServers(Case):
    def test_salts_models_and_adapters_stay_apart_even_where_the_server_mixes_them_up(self):
        self.server.apart = False
        self.set()
        prompt = self.prompt(30)
        self.fill(prompt)
        salted = request("salted", prompt)
        salted.salt = "mine"
        engine = self.engine()
        engine.run(salted)
        engine.check()
        counters = self.counters(engine)
        assert counters["failed_blocks"] > 0, "the server gave nothing that was to be refused"
        assert "loaded_blocks" not in counters
        engine.close()
        self.found(prompt, layout=make_layout(model="other"))
        assert self.found(prompt) == 24

    def test_the_salt_stands_for_all_that_decides_a_prompts_blocks(self, server):
        self.fill(self.prompt(30))
        salted = request("salted", self.prompt(30))
        salted.salt = "m@i/n\\e\0" * 100  # what the server refuses in a salt
        engine = self.engine()
        engine.run(salted, request("plain", self.prompt(30)))
        engine.check()
        assert (engine.num_cached("salted"), engine.num_cached("plain")) == (0, 24)
        engine.close()
        salts = {name[2] for name in server.objects}
        assert len(salts) == 2
        assert all(re.fullmatch(r"[0-9a-f]{64}", salt) for salt in salts)

    def test_a_server_that_dies_and_comes_back_with_other_chunks(self):
        prompts = [self.prompt(30, seed=seed) for seed in range(3)]
        self.set(timeout_seconds=0.3, retry_seconds=0.05)
        engine = self.engine()
        engine.run(request("before", prompts[0]))
        port = self.server.port
        self.server.close()
        engine.run(request("while", prompts[1]), request("while too", prompts[0]))
        self.server = FakeServer(chunk=4, port=port)
        deadline, number = time.monotonic() + 60, 0
        while not self.server.objects:  # it is met again after a pause, with what the engine computes then
            assert time.monotonic() < deadline
            time.sleep(0.1)
            number += 1
            engine.run(request(f"after {number}", self.prompt(30, seed=10 + number)))
        engine.check()
        engine.close()
        self.set()
        assert self.found(self.prompt(30, seed=10 + number)) == 28
        self.server.close()

    def test_a_server_that_is_not_there_yet(self):
        port = self.server.port
        self.server.close()
        self.set(timeout_seconds=0.3, retry_seconds=0.01)
        engine = self.engine()
        engine.run(request("before", self.prompt(30)))
        self.server = FakeServer(port=port)
        deadline, number = time.monotonic() + 60, 0
        while not self.server.objects:
            assert time.monotonic() < deadline
            number += 1
            engine.run(request(f"after {number}", self.prompt(30, seed=number)))
        engine.check()
        engine.close()
        self.server.close()

    def test_nothing_listens_and_nothing_waits(self):
        self.server.close()
        self.set(timeout_seconds=60, lookup_seconds=60)
        begun = time.monotonic()
        assert self.found(self.prompt(30)) == 0
        assert time.monotonic() - begun < 30

    def test_an_answer_that_comes_too_late_is_given_back_once(self):
        """The request is computed, then waits for room: what was found meanwhile is not the request's any more."""
        prompt = self.prompt(40)
        self.fill(prompt)
        asked, answered = threading.Event(), threading.Event()

        def late(found):
            asked.set()
            assert answered.wait(60)
            return found

        self.server.answers["lookup"] = late
        self.set(lookup_seconds=0.05, timeout_seconds=30)
        engine = self.engine(make_layout(num_blocks=14), max_num_batched_tokens=16)
        engine.add(request("first", self.prompt(30, seed=1), 20))
        engine.step()
        assert asked.wait(60)
        while not engine.outputs["first"]:
            engine.step()
        engine.add(request("late", prompt))
        engine.step()
        time.sleep(0.1)
        engine.step()
        assert not engine.outputs["late"], "frame's own fault: there was room"
        answered.set()
        time.sleep(0.1)
        engine.run()
        engine.check()
        engine.close()
        assert not any(self.server.locks.values())
        assert not [name for name, found in self.server.calls if found == "failed"]
        assert self.counters(engine).get("failed_blocks", 0) == 0

    def test_what_a_server_has_lost_meanwhile_is_computed(self):
        prompt = self.prompt(40)
        self.fill(prompt)
        self.server.answers["prepare_retrieve"] = lambda found: {"success": False, "data": b"", "context": {}}
        engine = self.engine()
        engine.run(request("found", prompt))
        engine.check()
        assert self.counters(engine)["failed_blocks"] == 9
        engine.close()
        self.server.locks.clear()

    def test_a_server_that_is_full_keeps_what_it_has(self):
        self.server.size = 3 * 4096
        self.fill(self.prompt(40))
        assert len(self.server.objects) == 3
        assert self.found(self.prompt(40)) == 24


class TestUnits(Case):
    def test_a_prompt_whose_beginning_the_engine_had_is_stored_from_its_beginning(self):
        """The beginning is shorter than a chunk of the server, whose chunks are found behind each other only."""
        shared, rest = self.prompt(14), self.prompt(26, seed=3)
        engine = self.engine()
        engine.run(request("first", shared))
        engine.run(request("second", shared + rest))
        engine.check()
        assert engine.num_cached("second") == 12
        engine.close()
        assert self.found(shared + rest) == 36

    def test_what_the_server_has_forgotten_is_stored_again(self):
        engine = self.engine()
        engine.run(request("first", self.prompt(30)))
        deadline = time.monotonic() + 60
        while len(self.server.objects) < 3:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.server.objects.clear()
        engine.run(request("longer", self.prompt(50)))
        engine.check()
        engine.close()
        assert self.found(self.prompt(50)) == 48

    def test_what_has_no_room_is_not_stored_and_counted(self):
        self.set(max_bytes=1)
        engine = self.engine()
        engine.run(request("a", self.prompt(30)))
        engine.check()
        assert self.counters(engine)["unstored_units"] == 3
        engine.close()
        assert not self.server.objects

    def test_units_that_no_thread_stores_take_no_room(self, monkeypatch):
        def refuse(*work):
            raise RuntimeError("can't start new thread")

        engine = self.engine()
        worker = engine.workers.made[0].transfer.inner
        with monkeypatch.context() as patch:
            patch.setattr(worker._store_thread, "submit", refuse)
            engine.run(request("a", self.prompt(30)))
        assert worker._num_bytes == 0
        engine.run(request("b", self.prompt(50, seed=1)))
        engine.check()
        assert self.counters(engine)["unstored_units"] == 3
        engine.close()
        assert self.found(self.prompt(50, seed=1)) == 48

    def test_prompts_shorter_than_a_chunk_are_not_asked_for(self):
        self.server.chunk = 64
        engine = self.engine()
        engine.run(request("a", self.prompt(30)))
        engine.check()
        engine.close()
        assert "lookup" not in {name for name, _ in self.server.calls}

    def test_nothing_is_left_at_the_server(self):
        prompts = [self.prompt(40), self.prompt(33, seed=1)]
        self.fill(*prompts)
        engine = self.engine(max_num_batched_tokens=8)
        for steps in range(6):
            engine.add(request(f"goes {steps}", prompts[0]))
            for _ in range(steps):
                engine.step()
            engine.engine.abort([f"goes {steps}"])
        engine.run(request("stays", prompts[1]))
        engine.check("stays")
        engine.close()
        assert not any(self.server.locks.values())
        assert not self.server.reading
        assert not self.server.writing
        assert not self.server.instances
        assert not self.server.sessions, "sessions were not ended"

    def test_what_is_told_of_a_step_is_counted(self):
        engine = self.engine()
        engine.run(request("a", self.prompt(30)))
        deadline = time.monotonic() + 60
        while self.counters(engine).get("stored_units") != 3:
            assert time.monotonic() < deadline
            engine.run(request(f"{time.monotonic()}", self.prompt(3, seed=1)))
        engine.close()


@pytest.fixture
def transfers(server):
    server.chunk = GEOMETRY.chunk
    made = Transfers(LMCacheOptions(server=server.address, timeout_seconds=60, retry_seconds=60), 0)
    yield made
    made.close()


def a_prompt(tokens=range(32), salt="s", name=b"unit"):
    tokens = list(tokens)
    return Prompt(
        session="one", salt=salt, unit=8, tokens=encode(tokens), units=[b"%s %d" % (name, i) for i in range(4)]
    )


def looked_up(server, prompt):
    key = lmcache_transfers.key_of(prompt, GEOMETRY, prompt.session, 0, 32, None)
    server.lookup(msgspec.msgpack.decode(msgspec.msgpack.encode(key)), 1)


def units_of(count, seed=0):
    return list(np.random.default_rng(seed).integers(0, 256, (count, UNIT_BYTES), np.uint8))


def test_a_lookup_that_nobody_waits_for_finds_nothing():
    early, late = (Lookup(a_prompt(), GEOMETRY, time.monotonic() + 60) for _ in range(2))
    assert early.open
    assert early.answer(5)
    assert (early.open, early.chunks, early.units) == (False, 5, 2)
    assert early.drop()
    assert not late.drop()
    assert not late.answer(5), "the thread that asked is to give back what it found"
    assert (late.chunks, late.units) == (0, 0)


def test_an_answer_counts_for_whoever_comes_first_at_its_deadline():
    """Else what the server keeps would be given back twice: once for the answer, once for the deadline."""
    answered, lapsed = (Lookup(a_prompt(), GEOMETRY, time.monotonic() - 1) for _ in range(2))
    assert answered.answer(5)
    answered.lapse()
    assert (answered.chunks, answered.drop()) == (5, True)
    lapsed.lapse()
    assert not lapsed.answer(5), "the thread that asked is to give back what it found"
    assert (lapsed.open, lapsed.chunks, lapsed.units) == (False, 0, 0)


def test_a_server_is_sought_again_after_it_rested(server):
    """Also where the thread that was to seek it came when it rested already."""
    server.answers["get_chunk_size"] = lambda found: b"\xc1"
    lookups = Lookups(LMCacheOptions(server=server.address, retry_seconds=0.2), 1, 4)
    lookups.start(lambda chunk: ("model", 100))
    del server.answers["get_chunk_size"]
    time.sleep(0.3)
    clients = [lookups._clients.get() for _ in range(4)]
    lookups.seek()
    lookups._rest()
    for client in clients:
        lookups._clients.put(client)
    deadline = time.monotonic() + 60
    while lookups.geometry is None:
        assert time.monotonic() < deadline
        lookups.seek()
        time.sleep(0.01)
    lookups.close()


def test_units_come_back_as_they_were(server, transfers):
    prompt, units = a_prompt(), units_of(3)
    assert transfers.store(prompt, GEOMETRY, 0, units)
    assert len(server.objects) == 6
    assert transfers.store(prompt, GEOMETRY, 1, units[1:]), "what is there already counts as stored"
    looked_up(server, prompt)
    found = [np.zeros(UNIT_BYTES, np.uint8) for _ in range(2)]
    assert transfers.fetch(prompt, GEOMETRY, 1, found) == [True, True]
    assert all(map(np.array_equal, found, units[1:]))
    transfers.skip(prompt, GEOMETRY, 0, 1)
    assert not any(server.locks.values())


@pytest.mark.parametrize("place", [0, 7, 8, 24, HEADER.size - 1, HEADER.size, HEADER.size + 49])
def test_every_byte_of_an_object_counts(server, transfers, place):
    prompt, units = a_prompt(), units_of(2)
    assert transfers.store(prompt, GEOMETRY, 0, units)
    offset = min(server.objects.values())[0] + place
    os.pwrite(server.memory, bytes([os.pread(server.memory, 1, offset)[0] ^ 16]), offset)
    looked_up(server, prompt)
    assert transfers.fetch(prompt, GEOMETRY, 0, units_of(2, seed=1)) == [False, True]


@pytest.mark.parametrize("size", [0, 1, 4095, 4096, 4097, 3 * 4096 + 5])
def test_checksums_tell_contents_apart(size):
    draw = np.random.default_rng(size)
    one = draw.integers(0, 256, size, np.uint8)
    seen = {checksum(one), checksum(np.zeros(size, np.uint8)), checksum(np.zeros(size + 1, np.uint8))}
    assert len(seen) == (3 if one.any() else 2)
    assert checksum(np.concatenate([one[:0], one])) == checksum(one)
    for place in draw.choice(size, min(size, 200), replace=False):
        other = one.copy()
        other[place] ^= 1 << draw.integers(8)
        seen.add(checksum(other))
    for row in range(size // 4096 - 1):  # rows and words that change places, a part that came too late
        for moved in (4096, 8):
            other = one.copy()
            first, second = slice(row * 4096, row * 4096 + moved), slice((row + 1) * 4096, (row + 1) * 4096 + moved)
            other[first], other[second] = one[second], one[first]
            seen.add(checksum(other))
        other = one.copy()
        other[row * 4096 + 100 :] = 0
        seen.add(checksum(other))
    assert len(seen) == (3 if one.any() else 2) + min(size, 200) + 3 * max(0, size // 4096 - 1)


def test_objects_of_other_prompts_are_refused(server, transfers):
    """Tokens and salt are equal, so that the server takes one for the other; the hashes of the blocks are not."""
    assert transfers.store(a_prompt(), GEOMETRY, 0, units_of(2))
    other = a_prompt(name=b"other")
    looked_up(server, other)
    assert transfers.fetch(other, GEOMETRY, 0, units_of(2, seed=1)) == [False, False]
    assert not transfers.resting, "the server did nothing wrong"


@pytest.mark.parametrize("what", OBJECTS)
def test_places_that_are_wrong_are_neither_written_nor_read(server, transfers, what):
    if what == "others' place":
        pytest.skip("the server gives a place, and what others have there is found to be wrong")
    prompt = a_prompt()
    assert transfers.store(prompt, GEOMETRY, 0, units_of(1))
    looked_up(server, prompt)
    held = server.path.read_bytes()
    server.answers["prepare_store"] = server.answers["prepare_retrieve"] = changed(OBJECTS[what])
    assert not transfers.store(prompt, GEOMETRY, 1, units_of(1, seed=1))
    assert transfers.resting
    assert server.path.read_bytes() == held, "something was written"
    other = Transfers(LMCacheOptions(server=server.address, retry_seconds=60), 0)
    assert other.fetch(prompt, GEOMETRY, 0, units_of(1, seed=2)) == [False]
    assert other.resting
    other.close()


def test_a_place_that_was_reserved_too_long_ago_is_not_written(server, transfers, monkeypatch):
    monkeypatch.setattr(lmcache_transfers, "WRITE_SECONDS", -1.0)
    assert not transfers.store(a_prompt(), GEOMETRY, 0, units_of(2))
    assert not server.objects
    assert transfers.resting


def test_memory_that_shrank_is_read_no_further(server, transfers):
    prompt = a_prompt()
    assert transfers.store(prompt, GEOMETRY, 0, units_of(2))
    looked_up(server, prompt)
    os.ftruncate(server.memory, 10)
    assert transfers.fetch(prompt, GEOMETRY, 0, units_of(2, seed=1)) == [False, False]


@pytest.mark.parametrize(
    "name", ["", "/", "pool", "lmcache_l1_pool_", "lmcache_l1_pool_a/b", "lmcache_l1_pool_" + "x" * 201]
)
def test_names_of_other_files_are_refused(name):
    with pytest.raises(ValueError, match="no shared memory, or none of a known form"):
        SharedPool(name, 100)


def test_files_that_are_no_memory_of_this_user_are_refused(tmp_path):
    def pool(size=100):
        return SharedPool("/lmcache_l1_pool_x", size, tmp_path)

    path = tmp_path / "lmcache_l1_pool_x"
    with pytest.raises(ValueError, match="cannot be opened"):
        pool()
    path.write_bytes(bytes(100))
    path.chmod(0o600)
    made = pool()
    assert made.fits(60, 40)
    assert not any(made.fits(offset, length) for offset, length in ((61, 40), (-1, 4), (0, 101), (1 << 70, 1)))
    made.close()
    made.close()
    for size in (0, -1, 101, 1 << 62):
        with pytest.raises(ValueError, match="is not a file of"):
            pool(size)
    path.chmod(0o602)
    with pytest.raises(ValueError, match="others can write to it"):
        pool()
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match="cannot be opened"):
        pool()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(ValueError, match="is not a file of"):
        pool()


def test_late_answers_are_not_taken_for_others(server):
    client = Client(Address(host="127.0.0.1", port=server.port), timeout=60, retry=0)
    server.answers["get_chunk_size"] = lambda found: [b"\x63", b"\x15", b"\x07"]  # of number 99
    with pytest.raises(LMCacheError, match="no answer came within"):
        Client(client._address, timeout=0.2, retry=0).call("get_chunk_size", answer=int)
    del server.answers["get_chunk_size"]
    assert client.call("get_chunk_size", answer=int) == 8
    client.close()
    with pytest.raises(LMCacheError, match="a moment ago"):
        client.call("get_chunk_size", answer=int)


def test_a_failure_costs_a_pause(server):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        client = Client(Address(host="127.0.0.1", port=deaf.getsockname()[1]), timeout=1, retry=60)
        with pytest.raises(LMCacheError, match="cannot be reached") as failure:
            client.call("get_chunk_size", answer=int)
    client.fail(failure.value)
    assert client.resting


def test_options():
    assert LMCacheOptions().address() == Address(host="127.0.0.1", port=5555)
    assert LMCacheOptions(server="tcp:[::1]:7").address() == Address(host="::1", port=7)
    assert LMCacheOptions(server="tcp:localhost:7").address().host == "localhost"
    assert LMCacheOptions(server="tcp:10.0.0.1:7", trusted_network=True).address().host == "10.0.0.1"
    with pytest.raises(ValidationError, match="not a loopback address"):
        LMCacheOptions(server="tcp:10.0.0.1:7")
    for wrong in ("unix:/a", "tcp:localhost", "localhost:7", "tcp:localhost:70000"):
        with pytest.raises(ValidationError, match="write tcp:host:port"):
            LMCacheOptions(server=wrong)


def test_vllms_names():
    for name in ("LMCacheConnectorV1", "LMCacheMPConnector"):
        assert Registry.load().offer("connector", name).provider.name == "lmcache"


def test_states_are_refused():
    config = from_flat({"kv_connector": "lmcache"})
    setup = make_setup("connector", layout=make_layout(states=4, checkpoints=8))
    with pytest.raises(PluginError, match="cannot keep the running state of layer"):
        Registry.load().make("connector", "lmcache", setup, config)


def test_without_pyzmq_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "zmq", None)
    with pytest.raises(ValueError, match=re.escape("needs pyzmq: pip install 'frame-llm[lmcache]'")):
        Client(Address(host="127.0.0.1", port=1), timeout=1, retry=1)
