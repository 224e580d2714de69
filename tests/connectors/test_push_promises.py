"""Memory of a device that a sender may write to is nobody else's before the sender is done, or gone for long enough."""

from __future__ import annotations

import gc
import time
import weakref

import pytest
import torch

from frame.interfaces import Mesh
from frame.plugins.connectors.blocks.callers import is_over
from frame.plugins.connectors.blocks.host_arena import HostArena
from frame.plugins.connectors.blocks.mapped_memory import PROBE_BYTES, Mapper
from frame.plugins.connectors.blocks.wire import send_bytes
from frame.plugins.connectors.push.buffer import DeviceBuffer
from frame.plugins.connectors.push.door import Door
from frame.plugins.connectors.push.facts import Facts
from frame.plugins.connectors.push.inbox import Inbox
from frame.plugins.connectors.push.prompts import Row
from frame.plugins.connectors.push.wire import (
    Ask,
    Begin,
    Drop,
    End,
    Full,
    Have,
    Mapped,
    Meet,
    No,
    Offered,
    Part,
    Ready,
    Written,
    connect,
)
from frame.testing.fake_cache import make_layout
from tests.connectors.mapped_files import FileSharing
from tests.connectors.push_pairs import SECONDS, SECRET

LAYOUT = make_layout()  # one group of two layers, blocks of 4 tokens
FACTS = Facts.of(LAYOUT, Mesh(), "format")
BYTES = 256
DIGEST, OTHER = b"d" * 32, b"e" * 32
EXPIRY = 5.0


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


class Worker:
    """One that takes blocks, in a device buffer for two prompts of two blocks."""

    def __init__(self, folder):
        self.clock = Clock()
        arena = HostArena(1 << 16, lambda count: torch.zeros(count, dtype=torch.uint8))
        self.buffer = DeviceBuffer(FileSharing(folder), "here", 8 * BYTES, 2)
        self.inbox = Inbox(
            LAYOUT,
            [Row(0, BYTES)] * 2,
            arena,
            "127.0.0.1",
            secret=SECRET.encode(),
            facts=FACTS,
            rank=0,
            expiry=EXPIRY,
            buffer=self.buffer,
            clock=self.clock,
        )
        self.door = Door("127.0.0.1", 0, secret=SECRET.encode(), facts=[FACTS], ports=[self.inbox.port])

    def until(self, done):
        latest = time.monotonic() + SECONDS
        while not done():
            assert time.monotonic() < latest, "it does not come to that"
            time.sleep(0.001)

    def tells(self, state, digest=DIGEST):
        self.until(lambda: self.inbox.take().events.get(digest) == state)


class Writer:
    """A sender, which has mapped the buffer if it is `mapped`."""

    def __init__(self, worker, folder, mapped=True):
        place = ("127.0.0.1", worker.door.port)
        self.sharing = FileSharing(folder)
        self.connection, self.channel = connect(place, SECRET.encode(), Meet(FACTS, 0), SECONDS)
        if mapped:
            offered = self.ask(Ask(), Offered | No)
            mapper = Mapper(self.sharing, "here")
            self.opened = mapper.open(offered.offer)
            mapper.write(offered.scratch + self._move(offered), b"w" * PROBE_BYTES)
            assert self.ask(Mapped(b"w" * PROBE_BYTES)) == Ready("direct")

    def _move(self, offered):
        start, _ = self.sharing.open(offered.offer.regions[0].handle)
        return start - offered.offer.regions[0].address

    def ask(self, message, kinds=Ready | Have | No | Full):
        self.channel.send(message, SECONDS)
        return self.channel.receive(kinds, SECONDS)

    def begin(self, digest=DIGEST, num_tokens=8, waits=False):
        return self.ask(Begin(digest, num_tokens, waits))

    def say(self, *messages):
        for message in messages:
            self.channel.send(message, SECONDS)

    def close(self):
        self.connection.close()


@pytest.fixture
def worker(tmp_path):
    made = Worker(tmp_path)
    yield made
    made.door.close()
    made.inbox.close()


@pytest.fixture
def writer(worker, tmp_path):
    made = Writer(worker, tmp_path)
    yield made
    made.close()


def used(worker):
    """Bytes of the buffer that are given away, once what expires has."""
    worker.inbox.take()
    return worker.buffer.arena.used_bytes


WHOLE = (Part(DIGEST, 0, 0, 2), Part(DIGEST, 1, 0, 2), End(DIGEST))


def test_a_whole_prompt_is_told_without_a_byte(worker, writer):
    ready = writer.begin()
    assert (ready.session, len(ready.addresses)) == ("direct", 2)
    writer.say(*WHOLE)
    worker.tells("arrived")
    prompt = worker.inbox.claim(DIGEST)
    assert [part.data_ptr() for part in prompt.parts] == ready.addresses
    assert used(worker) == 4 * BYTES
    worker.inbox.release(prompt)
    assert used(worker) == 0


@pytest.mark.parametrize("last", [End(DIGEST), Drop(DIGEST)], ids=["end", "drop"])
@pytest.mark.parametrize("how", ["expired", "forgotten"])
def test_a_slow_sender_keeps_what_it_was_promised(worker, writer, how, last):
    writer.begin()
    writer.say(WHOLE[0])
    worker.until(lambda: worker.inbox.take().num_bytes)
    if how == "expired":
        worker.clock.now += 1000
    else:
        worker.inbox.forget()
    worker.tells("gone")
    assert used(worker) == 4 * BYTES
    writer.say(WHOLE[1], last)
    assert writer.begin(OTHER).session == "direct"  # so that what it said before has been heard
    assert used(worker) == 4 * BYTES
    assert worker.inbox.claim(DIGEST) is None


def test_what_a_sender_that_is_gone_may_be_writing_stays_for_a_while(worker, writer):
    writer.begin()
    writer.close()
    worker.tells("gone")
    worker.until(lambda: worker.inbox._lost)
    assert used(worker) == 4 * BYTES
    worker.clock.now += EXPIRY - 0.1
    assert used(worker) == 4 * BYTES
    worker.clock.now += 0.2
    assert used(worker) == 0


def test_who_says_nonsense_keeps_its_memory_until_it_hangs_up(worker, writer):
    """It cannot know yet that nobody listens to it any more."""
    writer.begin()
    writer.say(Part(DIGEST, 7, 0, 1))
    worker.tells("gone")
    worker.until(lambda: is_over(writer.connection))
    worker.clock.now += 10 * EXPIRY
    assert used(worker) == 4 * BYTES
    writer.say(*WHOLE)
    time.sleep(0.05)
    worker.clock.now += 10 * EXPIRY
    assert used(worker) == 4 * BYTES
    writer.close()
    worker.until(lambda: worker.inbox._lost)
    worker.clock.now += EXPIRY + 1
    assert used(worker) == 0


def test_a_prompt_that_is_being_written_is_not_begun_again(worker, writer):
    """Two requests may have one prompt; the first one's memory is not given away while its blocks are under way."""
    first = writer.begin()
    assert isinstance(writer.begin(), Have)
    worker.clock.now += 1000
    worker.tells("gone")
    assert isinstance(writer.begin(), Have)
    assert used(worker) == 4 * BYTES
    writer.say(Drop(DIGEST))
    again = writer.begin()
    assert again.session == "direct"
    assert first.addresses == again.addresses


def test_what_does_not_fit_goes_over_the_connection_also_when_nobody_wants_it_any_more(worker, writer):
    held = worker.buffer.arena.take(8 * BYTES)
    assert writer.begin() == Ready()
    worker.inbox.forget()
    worker.buffer.arena.give_back(held)
    for part in WHOLE[:2]:
        writer.say(part)
        send_bytes(writer.connection, memoryview(bytes(2 * BYTES)), SECONDS)
    writer.say(End(DIGEST))
    assert writer.begin().session == "direct"
    writer.say(*WHOLE)
    worker.tells("arrived")


def test_who_proves_nothing_is_promised_nothing(worker, tmp_path):
    stranger = Writer(worker, tmp_path, mapped=False)
    assert isinstance(stranger.ask(Mapped(bytes(PROBE_BYTES))), No)
    assert isinstance(stranger.ask(Ask(), Offered | No), Offered)
    assert isinstance(stranger.ask(Ask(), Offered | No), No)
    assert isinstance(stranger.ask(Mapped(b"x" * PROBE_BYTES)), No)
    assert stranger.begin() == Ready()
    assert used(worker) == 0
    assert worker.inbox.arena.used_bytes == 4 * BYTES
    stranger.close()


def test_as_many_may_map_it_as_have_a_place_for_their_proof(worker, tmp_path):
    writers = [Writer(worker, tmp_path) for _ in range(2)]
    third = Writer(worker, tmp_path, mapped=False)
    assert isinstance(third.ask(Ask(), Offered | No), No)
    writers[0].close()
    worker.until(lambda: isinstance(third.ask(Ask(), Offered | No), Offered))
    for one in (writers[1], third):
        one.close()


def test_the_buffer_outlives_its_engine_while_a_sender_may_write_to_it(tmp_path):
    """Else memory that this process uses for something else would be written to."""
    worker = Worker(tmp_path)
    writer, other = Writer(worker, tmp_path), Writer(worker, tmp_path, mapped=False)
    writer.begin()
    worker.door.close()
    worker.inbox.close()
    buffer = weakref.ref(worker.buffer)
    del worker
    for one in (writer, other):
        latest = time.monotonic() + SECONDS
        while not is_over(one.connection):
            assert time.monotonic() < latest
            time.sleep(0.001)
    gc.collect()
    assert buffer() is not None
    writer.say(*WHOLE)
    writer.close()
    latest = time.monotonic() + SECONDS
    while buffer() is not None:
        assert time.monotonic() < latest, "the buffer is never given back"
        gc.collect()
        time.sleep(0.001)
    other.close()


@pytest.fixture
def full(worker, writer):
    """The device's buffer has no room."""
    held = worker.buffer.arena.take(8 * BYTES)
    assert writer.begin(waits=True) == Full()
    worker.tells("begun")
    return held


def test_who_waits_gets_room_once_there_is_some(worker, writer, full):
    worker.clock.now += EXPIRY - 1
    assert writer.begin(waits=True) == Full()
    worker.clock.now += EXPIRY - 1
    assert DIGEST not in worker.inbox.take().events
    worker.buffer.arena.give_back(full)
    assert writer.begin(waits=True).session == "direct"
    writer.say(Written(DIGEST, [(0, 0, 1), (0, 1, 1), (1, 0, 2)]), End(DIGEST))
    worker.tells("arrived")


def test_who_waits_no_longer_sends_over_the_connection(worker, writer, full):
    assert writer.begin() == Ready()
    assert worker.inbox.arena.used_bytes == 4 * BYTES
    assert not worker.inbox._waiting


@pytest.mark.parametrize("how", ["drop", "close", "expiry"])
def test_of_what_waits_no_longer_the_request_hears(worker, writer, full, how):
    if how == "drop":
        writer.say(Drop(DIGEST))
    elif how == "close":
        writer.close()
    else:
        worker.clock.now += EXPIRY + 1
    worker.tells("gone")
    assert not worker.inbox._waiting


@pytest.mark.parametrize("digest", [DIGEST, None])
def test_what_waits_and_is_not_wanted_any_more_is_not_sent(worker, writer, full, digest):
    worker.inbox.forget(digest)
    worker.tells("gone")
    worker.buffer.arena.give_back(full)
    assert writer.begin(waits=True) == Have()
    assert writer.begin(waits=True).session == "direct"


def test_another_sender_does_not_send_what_waits(worker, writer, full, tmp_path):
    other = Writer(worker, tmp_path)
    assert other.begin(waits=True) == Have()
    worker.inbox.forget(DIGEST)
    assert other.begin(waits=True) == Full()
    assert writer.begin(waits=True) == Have()
    other.close()


def test_for_room_that_never_comes_nobody_waits(worker, writer, full, tmp_path):
    assert writer.begin(OTHER, 32, waits=True) == Ready()
    plain = Writer(worker, tmp_path, mapped=False)
    assert plain.begin(bytes(32), waits=True) == Ready()
    plain.close()


def test_who_has_written_what_nobody_promised_is_hung_up_on(worker, writer):
    held = worker.buffer.arena.take(8 * BYTES)
    assert writer.begin() == Ready()
    writer.say(Written(DIGEST, [(0, 0, 2)]))
    worker.tells("gone")
    assert held is not None
    worker.until(lambda: is_over(writer.connection))


@pytest.mark.parametrize("part", [(2, 0, 1), (0, 2, 1), (0, 1, 2), (0, 0, 0), (-1, 0, 1)])
def test_who_has_written_what_is_none_of_the_prompt_is_hung_up_on(worker, writer, part):
    writer.begin()
    made = Written(DIGEST, [])
    made.parts.append(part)  # though it may not be said
    writer.say(made)
    worker.tells("gone")
    worker.until(lambda: is_over(writer.connection))
