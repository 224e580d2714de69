"""Blocks that other engines sent to a worker and that no request has yet, in memory of a fixed size.

What a prompt's blocks are is said by its digest, so they are right for whoever knows the prompt, whenever they came.
Knows no request and no device.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence

import numpy as np
from torch import Tensor

from frame.interfaces import KVLayout

from ..blocks.callers import Callers, await_end, fall_silent, listen, shut_down
from ..blocks.host_arena import Arena
from ..blocks.mapped_memory import PROBE_BYTES
from ..blocks.wire import PeerError, receive_into
from ..nixl.wire import Channel
from .buffer import DIRECT, DeviceBuffer
from .facts import Facts
from .messages import State, keeps_states, spans
from .prompts import Counts, Prompt, Row, Sender, Waiting
from .wire import Ask, Begin, Drop, End, Full, Have, Mapped, Message, No, Offered, Part, Ready, Written, meet_caller

logger = logging.getLogger("frame.connectors.push")

#: Connections at a time; further ones are closed at once.
MAX_CALLERS = 256
_HELLO_SECONDS = 5.0
#: What becomes of at most so many prompts is kept for a scheduler side that does not ask.
_MAX_EVENTS = 4096
#: Prompts that wait for room.
_MAX_WAITING = 1024


class Inbox:
    """See the module. Listens at `host`, any port, until `close`; `facts` and `rank` are those a sender must have.

    With `session` senders write to the arena's memory themselves, and so do those that can map `buffer`. What they were
    promised there is not given to others before they have said that they are done, or are gone for `expiry` seconds.
    Raises `ValueError` when the address cannot be used.
    """

    def __init__(
        self,
        layout: KVLayout,
        rows: Sequence[Row],
        arena: Arena,
        host: str,
        *,
        secret: bytes,
        facts: Facts,
        rank: int,
        expiry: float,
        session: str = "",
        buffer: DeviceBuffer | None = None,
        name: str = "push",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._layout = layout
        self._rows = list(rows)
        self.arena = arena
        self._secret, self._facts, self._rank = secret, facts, rank
        self._expiry = expiry
        self._session = session
        self.buffer = buffer
        self._writers: set[socket.socket] = set()  # connections of those that map it
        self._lost: list[tuple[float, Prompt]] = []  # when memory is free to which a writer that is gone may write
        self._clock = clock
        self._prompts: dict[bytes, Prompt] = {}
        self._waiting: dict[bytes, Waiting] = {}  # for room in the buffer
        self._counts = Counts()
        self._lock = threading.Lock()
        listener = listen(host, 0, name)
        self.port = int(listener.getsockname()[1])
        self._callers = Callers(listener, self._serve, most=MAX_CALLERS, name=name, end=self._hang_up)

    def take(self) -> Counts:
        """What came since the last call, and what became of prompts."""
        with self._lock:
            self._expire()
            counts, self._counts = self._counts, Counts()
            return counts

    def claim(self, digest: bytes) -> Prompt | None:
        """A prompt whose blocks are all there; nobody else gets it, and `release` must follow."""
        with self._lock:
            prompt = self._prompts.get(digest)
            if prompt is None or not prompt.arrived:
                return None
            del self._prompts[digest]
            prompt.gone = True
            prompt.users += 1
            return prompt

    def release(self, prompt: Prompt) -> None:
        """Called when nobody reads or writes a prompt's memory any more that was claimed or entered."""
        with self._lock:
            self._free(prompt)

    def forget(self, digest: bytes | None = None) -> None:
        """Drops a prompt, or all of them."""
        with self._lock:
            for prompt in list(self._prompts.values()) if digest is None else [self._prompts.get(digest)]:
                if prompt is not None:
                    self._drop(prompt)
            for name, waiting in self._waiting.items():
                if digest in (None, name) and not waiting.unwanted:
                    waiting.unwanted = True
                    self._tell(name, "gone")

    def close(self) -> None:
        """Closes the listener and all connections, but of those that map the buffer: it stays while they may write."""
        self._callers.close()

    def _hang_up(self, caller: socket.socket) -> None:
        with self._lock:
            writes = caller in self._writers
        (fall_silent if writes else shut_down)(caller)

    def _serve(self, caller: socket.socket) -> None:
        channel = meet_caller(caller, self._secret, {self._rank: self._facts}, _HELLO_SECONDS).channel
        channel.send(Ready(), _HELLO_SECONDS)
        sender = Sender(caller, self._session, "{}:{}".format(*caller.getpeername()[:2]))
        try:
            while True:
                message: Message = channel.receive(Message, None)
                self._take(sender, channel, message)
        except (PeerError, OSError):
            self._end(sender)
            if sender.session == DIRECT:
                self._await_end(sender)
            raise
        finally:
            self._end(sender)
            self._part_from(sender)

    def _end(self, sender: Sender) -> None:
        """Nothing further is taken from a sender."""
        with self._lock:
            for prompt in list(self._prompts.values()):
                if prompt.source is sender and not prompt.arrived:
                    self._drop(prompt)
            for name in [name for name, waiting in self._waiting.items() if waiting.source is sender]:
                self._wait_no_more(name)

    def _await_end(self, sender: Sender) -> None:
        """A sender writes until it has heard that nobody listens; nobody else gets that memory before, however late."""
        if await_end(sender.connection, self._expiry):
            return
        with self._lock:
            num_bytes = sum(prompt.memory.numel() for prompt in sender.begun.values())
        logger.warning(
            "an engine that sends KV blocks (%s) does not hang up: %d bytes of this device's memory, to which it may "
            "write, are not used until it does, or its process ends",
            sender.where,
            num_bytes,
        )
        await_end(sender.connection, None)
        logger.info("the engine that sent KV blocks (%s) has hung up", sender.where)

    def _part_from(self, sender: Sender) -> None:
        """A sender is gone; what it began to write before may still come."""
        with self._lock:
            until = self._clock() + self._expiry
            self._lost += [(until, prompt) for prompt in sender.begun.values()]
            sender.begun = {}
            self._writers.discard(sender.connection)
        if self.buffer is not None and sender.scratch is not None:
            self.buffer.scratch.give_back(sender.scratch)

    def _take(self, sender: Sender, channel: Channel, message: Message) -> None:
        if isinstance(message, Begin):
            channel.send(self._begin(sender, message), _HELLO_SECONDS)
        elif isinstance(message, Part):
            self._receive(sender, message)
        elif isinstance(message, Written):
            for layer, first, count in message.parts:
                self._receive(sender, Part(message.digest, layer, first, count), written=True)
        elif isinstance(message, Ask):
            channel.send(self._offered(sender), _HELLO_SECONDS)
        elif isinstance(message, Mapped):
            channel.send(self._admitted(sender, message), _HELLO_SECONDS)
        else:
            self._finish(sender, message)

    def _offered(self, sender: Sender) -> Offered | No:
        if self.buffer is None:
            return No("that engine lets no memory of a device be mapped")
        if sender.scratch is not None or (scratch := self.buffer.scratch.take(PROBE_BYTES)) is None:
            return No("that engine is asked for its memory too often")
        sender.scratch = scratch
        try:
            return self.buffer.offered(scratch)
        except RuntimeError as error:
            return No(str(error))

    def _admitted(self, sender: Sender, mapped: Mapped) -> Ready | No:
        try:
            if self.buffer is None or sender.scratch is None or not self.buffer.proves(sender.scratch, mapped.written):
                return No("what is written there does not arrive")
        except RuntimeError as error:
            return No(str(error))
        sender.session = DIRECT
        with self._lock:
            self._writers.add(sender.connection)
        return Ready(DIRECT)

    def _finish(self, sender: Sender, message: End | Drop) -> None:
        with self._lock:
            written = sender.begun.pop(message.digest, None)
            if written is not None:
                self._free(written)
            if message.digest in self._waiting and self._waiting[message.digest].source is sender:
                self._wait_no_more(message.digest)
            prompt = self._prompts.get(message.digest)
            if prompt is None or prompt.source is not sender or prompt.arrived:
                return
            if isinstance(message, End) and prompt.whole:
                prompt.arrived = True
                prompt.deadline = self._clock() + self._expiry
                self._tell(prompt.digest, "arrived")
            else:
                self._drop(prompt)

    def _begin(self, sender: Sender, begin: Begin) -> Ready | Have | No | Full:
        if keeps_states(self._layout) and begin.num_tokens % self._layout.grain:
            return No("these are no whole blocks")
        places = spans(self._layout, begin.num_tokens)
        counts = [places[row.group][1] - places[row.group][0] for row in self._rows]
        sizes = [count * row.num_bytes for count, row in zip(counts, self._rows, strict=True)]
        with self._lock:
            self._expire()
            before = self._prompts.get(begin.digest)
            if before is not None and (before.arrived or before.source is not sender):
                return Have()
            if begin.digest in sender.begun:
                return Have()  # for another request of that engine, which may still be writing
            if before is not None:
                self._drop(before)
            waiting = self._waiting.get(begin.digest)
            if waiting is not None and waiting.source is sender and waiting.unwanted:
                del self._waiting[begin.digest]
                return Have()
            if waiting is not None and waiting.source is not sender:
                if not waiting.unwanted:
                    return Have()
                del self._waiting[begin.digest]
            session, arena, memory = self._room(sender, sum(sizes))
            if begin.waits and session != DIRECT and self._may_wait(sender, begin.digest, sum(sizes)):
                if memory is not None:
                    arena.give_back(memory)
                return Full()
            self._waiting.pop(begin.digest, None)
            if memory is None:
                self._tell(begin.digest, "gone")
                return No("it has no room for further blocks")
            parts = [
                part.view(count, row.num_bytes)
                for part, count, row in zip(memory.split(sizes), counts, self._rows, strict=True)
            ]
            self._prompts[begin.digest] = prompt = Prompt(
                begin.digest,
                sender,
                session,
                arena,
                memory,
                [places[row.group][0] for row in self._rows],
                parts,
                [np.zeros(count, bool) for count in counts],
                self._clock() + self._expiry,
            )
            self._tell(begin.digest, "begun")
            if sender.session:
                prompt.users += 1
                sender.begun[begin.digest] = prompt
        return Ready(session, [part.data_ptr() for part in parts] if session else [])

    def _room(self, sender: Sender, num_bytes: int) -> tuple[str, Arena, Tensor | None]:
        """Where so many bytes of a sender go; what does not fit on the device is sent to host memory."""
        if self.buffer is not None and sender.session == DIRECT:
            memory = self.buffer.arena.take(num_bytes)
            if memory is not None:
                return DIRECT, self.buffer.arena, memory
            return "", self.arena, self.arena.take(num_bytes)
        return sender.session, self.arena, self.arena.take(num_bytes)

    def _may_wait(self, sender: Sender, digest: bytes, num_bytes: int) -> bool:
        """Whether a prompt gets room once others have left, and waits for it."""
        if self.buffer is None or sender.session != DIRECT or num_bytes > self.buffer.arena.num_bytes:
            return False
        waiting = self._waiting.get(digest)
        if waiting is None:
            if len(self._waiting) >= _MAX_WAITING:
                return False
            waiting = self._waiting[digest] = Waiting(sender)
            self._tell(digest, "begun")
        waiting.deadline = self._clock() + self._expiry
        return True

    def _wait_no_more(self, digest: bytes) -> None:
        """Nothing comes of a prompt for which there was no room."""
        if not self._waiting.pop(digest).unwanted:
            self._tell(digest, "gone")

    def _receive(self, sender: Sender, part: Part, *, written: bool = False) -> None:
        """Takes the bytes that follow, also of a prompt that is not wanted any more.

        None do where the sender has `written` them itself.
        """
        if part.layer >= len(self._rows):
            raise PeerError("a sender names a layer that is not there")
        num_bytes = self._rows[part.layer].num_bytes
        with self._lock:
            begun = sender.begun.get(part.digest)
            if written and (begun is None or begun.session == ""):
                raise PeerError("a sender has written blocks for which it was promised no memory")
            written = begun is not None and begun.session != ""
            prompt = self._prompts.get(part.digest)
            if prompt is not None and (prompt.source is not sender or prompt.arrived):
                prompt = None
            if prompt is not None:
                first = part.first - prompt.firsts[part.layer]
                if first < 0 or first + part.count > len(prompt.there[part.layer]):
                    raise PeerError("a sender names blocks that are not of the prompt")
                prompt.users += 1
        if prompt is None:
            if not written:
                _discard(sender.connection, part.count * num_bytes, self._expiry)
            return
        try:
            right = prompt.arena.on_device
            if not right:
                memory = prompt.parts[part.layer][first : first + part.count].view(-1).numpy().data
                if not written:
                    receive_into(sender.connection, memory, self._expiry)
                right = part.checksum < 0 or part.checksum == zlib.crc32(memory)
            with self._lock:
                self._counts.num_bytes += part.count * num_bytes
                if right:
                    prompt.there[part.layer][first : first + part.count] = True
                    prompt.deadline = self._clock() + self._expiry
                elif not prompt.gone:
                    logger.warning("blocks that were changed on their way are dropped")
                    self._drop(prompt)
        finally:
            self.release(prompt)

    def _free(self, prompt: Prompt) -> None:
        prompt.users -= 1
        if prompt.gone and not prompt.users:
            prompt.arena.give_back(prompt.memory)

    def _expire(self) -> None:
        now = self._clock()
        for _, prompt in [one for one in self._lost if one[0] <= now]:
            self._free(prompt)
        self._lost = [one for one in self._lost if one[0] > now]
        for prompt in [one for one in self._prompts.values() if one.deadline <= now]:
            self._drop(prompt)
        for name in [name for name, waiting in self._waiting.items() if waiting.deadline <= now]:
            self._wait_no_more(name)

    def _drop(self, prompt: Prompt) -> None:
        del self._prompts[prompt.digest]
        prompt.gone = True
        if not prompt.users:
            prompt.arena.give_back(prompt.memory)
        self._tell(prompt.digest, "gone")

    def _tell(self, digest: bytes, state: State) -> None:
        events = self._counts.events
        events.pop(digest, None)
        events[digest] = state
        if len(events) > _MAX_EVENTS:
            del events[next(iter(events))]


def _discard(caller: socket.socket, num_bytes: int, seconds: float) -> None:
    latest = time.monotonic() + seconds
    scratch = memoryview(bytearray(min(num_bytes, 1 << 20)))
    while num_bytes:
        piece = scratch[: min(num_bytes, len(scratch))]
        receive_into(caller, piece, max(latest - time.monotonic(), 1e-3))
        num_bytes -= len(piece)
