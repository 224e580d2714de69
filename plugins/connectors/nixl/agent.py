"""A worker's NIXL agent: the memory that others may read, and reads of theirs. One thread owns all of it.

Memory of another GPU that this one can map is read past NIXL (see `nixl_direct`).

Only this file imports nixl. Knows no request but by name, and no KV group.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from frame.interfaces import Mark
from frame.transfers import news

from ..blocks.mapped_memory import Opened
from .direct import Direct
from .maps import MAX_ROWS, Rows
from .messages import MARGIN_SECONDS, AgentFacts, LayerMemory
from .reads import Read, told

logger = logging.getLogger("frame.connectors.nixl")

#: Seconds between two looks: at reads, at copies past NIXL, which cost no call of it, and for notices.
_READ_POLL, _COPY_POLL, _NOTICE_POLL = 0.0002, 0.00003, 0.005
#: Other engines' workers that this one keeps in mind.
_MAX_PEERS = 256
#: How long reads that go on are waited for before the memory goes.
_CLOSE_SECONDS = 5.0
#: Seconds without a read after which memory of other engines is unmapped: one that sleeps gives it back only then.
_MAPPED_SECONDS = 30.0
#: How long a failed read may take until NIXL lets go of it.
_RELEASE_SECONDS = 10.0
#: What a slow read is measured by, in bytes a second: prompts are computed many times faster than it reads them.
_SLOW = 100e6


class Agent:
    """See the module. `layers` lie in the memory `regions`, pairs (address, bytes), which `direct` offers past NIXL.

    Raises `ValueError` when NIXL is missing or cannot have the memory.
    """

    def __init__(
        self,
        name: str,
        layers: Sequence[LayerMemory],
        regions: Sequence[tuple[int, int]],
        *,
        memory: str,
        backend_config: str,
        direct: Callable[[], Direct | None] = lambda: None,
        stall_seconds: float,
    ) -> None:
        self._layers = list(layers)
        self._memory = memory
        self._stall_seconds = stall_seconds
        self._work: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._reads: list[Read] = []
        self._peers: dict[str, Opened | None] = {}  # by the names that NIXL knows them by: what is mapped of them
        self._last_read = 0.0
        self._cut_off = False
        self._make_direct = direct
        self.direct = 0, 0.0  # reads that went past NIXL and have ended, and seconds from their launches to their ends
        self._lock = threading.Lock()
        self._ended: list[tuple[int, bool]] = []
        self._given_up: list[int] = []
        self._notices: list[bytes] = []
        self._awaits_notices = False
        self._ending = False  # reads that have not begun do not begin any more
        ready = threading.Event()
        fault: list[BaseException] = []

        def serve() -> None:
            try:
                self._open(name, regions, backend_config)
            except BaseException as error:
                fault.append(error)
            ready.set()
            if not fault:
                self._serve()

        self._thread = threading.Thread(target=serve, name="nixl-agent", daemon=True)
        self._thread.start()
        ready.wait()
        if fault:
            self._thread.join()
            raise ValueError(f"the nixl connector cannot start: {fault[0]}") from fault[0]

    def read(self, read: Read) -> None:
        """Begins a read; its end comes with `take`."""
        self._work.put(lambda: self._reads.append(read))

    def extend(self, load: int, deadline: float) -> None:
        """The lease of a load's reads ends later."""

        def extend() -> None:
            for read in self._reads:
                if read.load == load:
                    read.deadline = max(read.deadline, deadline)

        self._work.put(extend)

    def await_notices(self, awaits: bool) -> None:
        """Whether others may be reading this worker's blocks."""
        if awaits != self._awaits_notices:
            self._awaits_notices = awaits
            self._work.put(lambda: None)

    def take(self) -> tuple[list[tuple[int, bool]], list[bytes]]:
        """Since the last call: reads that ended, pairs (load, whether all arrived in time), and notices that came."""
        with self._lock:
            ended, self._ended = self._ended, []
            notices, self._notices = self._notices, []
        return ended, notices

    def take_given_up(self) -> list[int]:
        """Loads whose reads take too long, since the last call: they go on, and will end as not arrived."""
        with self._lock:
            given_up, self._given_up = self._given_up, []
        return given_up

    def end_reads(self) -> str | None:
        """Begins none of the reads that have not begun, and waits for the others: they may write to the memory.

        Returns what goes on after some seconds. Either way the agent goes on with later reads.
        """
        known = threading.Event()

        def begin_none() -> None:
            self._ending = True
            known.set()

        self._work.put(begin_none)
        known.wait()
        latest = time.monotonic() + _CLOSE_SECONDS
        while (reads := list(self._reads)) and time.monotonic() < latest:
            time.sleep(_READ_POLL)
        self._work.put(self._begin_again)
        return f"{told(reads)} and may still write to the KV cache" if reads else None

    def close(self) -> bool:
        """Ends all reads and takes the memory back; nothing is read or written when it returns.

        Returns whether some had to be cut off: of a GPU's memory, UCX may have handed out copies that end soon.
        """
        self._work.put(None)
        self._thread.join()
        return self._cut_off

    def _open(self, name: str, regions: Sequence[tuple[int, int]], backend_config: str) -> None:
        raised = logging.raiseExceptions
        try:
            import nixl
        except ImportError as error:
            raise ValueError(f"it needs NIXL ({error}): pip install 'frame-llm[nixl]'") from None
        logging.raiseExceptions = raised  # nixl sets it for the whole process
        logging.getLogger("nixl").setLevel(logging.WARNING)
        self._nixl = agent = nixl.nixl_agent(name, nixl.nixl_agent_config(enable_prog_thread=True, backends=[]))
        agent.create_backend("UCX", {"engine_config": backend_config} if backend_config else {})
        self._device = _device(self._layers)
        rows = [(address, size, self._device, "") for address, size in regions]
        self._registered = agent.register_memory(rows, self._memory) if rows else None
        self._direct = self._make_direct()
        offer = None if self._direct is None else self._direct.offer
        metadata = agent.get_agent_metadata()
        self.facts = AgentFacts(name, metadata, self._memory, self._layers, offer)  # type: ignore[arg-type]

    def _serve(self) -> None:
        while True:
            quiet = _MAPPED_SECONDS if any(self._peers.values()) else None
            pause = self._read_pause() if self._reads else _NOTICE_POLL if self._awaits_notices else quiet
            try:
                work = self._work.get(timeout=pause)
            except queue.Empty:
                work = self._nothing
            if work is None:
                break
            work()
            self._poll()
            self._unmap_unused()
        self._shut()

    def _read_pause(self) -> float:
        """Short while a copy past NIXL goes on, some milliseconds: what waits for it gains as much."""
        if all(read.given_up for read in self._reads):
            return _NOTICE_POLL
        by_nixl = any(read.handle is not None for read in self._reads)
        return _COPY_POLL if not by_nixl and any(read.copy is not None for read in self._reads) else _READ_POLL

    def _nothing(self) -> None:
        pass

    def _begin_again(self) -> None:
        self._ending = False

    def _poll(self) -> None:
        for read in list(self._reads):
            try:
                arrived = self._advance(read)
            except Exception as error:  # of the device, say: other reads go on
                arrived = self._fail(read, error)
            if arrived is not None:
                self._reads.remove(read)
                with self._lock:
                    self._ended.append((read.load, arrived))
                news.tell()
                if read.copied:  # behind the news, on which an answer waits, as it does not on the other side's blocks
                    self._tell_copied(read)
        if self._awaits_notices:
            self._take_notices()

    def _unmap_unused(self) -> None:
        if self._reads:
            self._last_read = time.monotonic()
        elif any(self._peers.values()) and time.monotonic() >= self._last_read + _MAPPED_SECONDS:
            for name in [name for name, opened in self._peers.items() if opened is not None]:
                self._forget(name)

    def _take_notices(self) -> None:
        try:
            found = self._nixl.get_new_notifs()
        except Exception:
            logger.exception("NIXL gave no notifications")
            return
        with self._lock:
            self._notices += [bytes(notice) for notices in found.values() for notice in notices]

    def _advance(self, read: Read) -> bool | None:
        """Whether all blocks of a read are there in time; None while it goes on.

        A read that began is over only once NIXL says so: until then it may write to this worker's blocks.
        """
        late = time.monotonic() > read.deadline - MARGIN_SECONDS
        if read.copy is not None:
            return self._end_copy(read, read.copy, late)
        if read.handle is None:
            if late or self._ending:
                return False
            return None if not read.mark.done() else self._begin(read)
        if read.failed_at is not None:
            return self._end_failed(read)
        try:
            state = self._nixl.check_xfer_state(read.handle)
        except Exception as error:  # nixlRemoteDisconnectError among them: the other side is gone
            return self._fail(read, error)
        return self._judge(read, state)

    def _begin(self, read: Read) -> bool | None:
        try:
            name, parts = self._meet(read.peer), read.rows()
            count = sum(map(len, parts))
            if not count:
                self._nixl.send_notif(name, read.notice)
                return True
            if count > MAX_ROWS:
                raise ValueError(f"they are {count} pieces of memory")
            opened = self._peers[name]
            if self._direct is not None and opened is not None:
                read.copy = self._direct.read(opened, parts)
                read.begun = time.monotonic()
                return None
            rows = Rows.join([part.told() for part in parts])
            read.begun = time.monotonic()
            read.awaited_until = read.begun + self._stall_seconds + float(rows.sizes.sum()) / _SLOW
            ours, theirs = (
                self._nixl.get_xfer_descs(_descriptors(places, rows.sizes, device), memory)
                for places, device, memory in (
                    (rows.ours, self._device, self._memory),
                    (rows.theirs, _device(read.peer.layers), read.peer.memory),
                )
            )
            read.handle = self._nixl.initialize_xfer("READ", ours, theirs, name, read.notice)
            state = self._nixl.transfer(read.handle)
        except Exception as error:
            return self._fail(read, error)
        return self._judge(read, state)

    def _end_copy(self, read: Read, copy: Mark, late: bool) -> bool | None:
        """As `_advance`; a copy that began cannot be stopped."""
        try:
            if not copy.done():
                return None
            copy.wait()
        except Exception as error:
            read.copy = None
            return self._fail(read, error)
        count, seconds = self.direct
        self.direct = count + 1, seconds + time.monotonic() - read.begun
        read.copied = True
        return not late

    def _tell_copied(self, read: Read) -> None:
        with suppress(Exception):  # without a word the other side keeps the blocks until the lease ends
            self._nixl.send_notif(read.peer.name, read.notice)

    def _judge(self, read: Read, state: str) -> bool | None:
        now = time.monotonic()
        late = now > read.deadline - MARGIN_SECONDS
        if state == "PROC":
            if late or now > read.awaited_until:
                self._give_up(read, now)
            return None
        if state != "DONE":
            return self._fail(read, state)
        self._released(read)
        return not (late or read.given_up)

    def _give_up(self, read: Read, now: float) -> None:
        """Has nobody wait for a read.

        It is not released: NIXL says that this ends it, and UCX writes what the other side sends later all the same,
        until the agent is gone. Over TCP UCX then ends the process of the other side once that one sends.
        """
        if read.given_up:
            return
        read.given_up = True
        logger.warning("a read from %s has not ended in %.0f s", read.peer.name, now - read.begun)
        with self._lock:
            self._given_up.append(read.load)
        news.tell()

    def _fail(self, read: Read, why: object) -> bool | None:
        """A read failed: that worker is taken for gone, and met anew if it is read again."""
        logger.warning("blocks could not be read from %s: %s", read.peer.name, why)
        read.failed_at = time.monotonic()
        return self._end_failed(read)

    def _end_failed(self, read: Read) -> bool | None:
        started = read.failed_at or 0.0
        if read.handle is not None and not self._released(read) and time.monotonic() < started + _RELEASE_SECONDS:
            return None
        others = (other for other in self._reads if other is not read and other.has_begun)
        if all(other.peer.name != read.peer.name for other in others):
            self._forget(read.peer.name)
        return False

    def _released(self, read: Read) -> bool:
        try:
            self._nixl.release_xfer_handle(read.handle)
        except Exception:
            return False
        return True

    def _meet(self, facts: AgentFacts) -> str:
        """The name that NIXL knows another worker by."""
        self._last_read = time.monotonic()
        if facts.name not in self._peers:
            if len(self._peers) >= _MAX_PEERS and not any(read.has_begun for read in self._reads):
                for name in list(self._peers):
                    self._forget(name)
            found = self._nixl.add_remote_agent(facts.metadata)
            name = found.decode() if isinstance(found, bytes) else found
            if name != facts.name:
                raise ValueError("what it says of its agent is of another one")
            self._peers[name] = None if self._direct is None else self._direct.open(facts.offer)
        return facts.name

    def _forget(self, name: str) -> None:
        if name in self._peers:
            opened = self._peers.pop(name)
            if opened is not None:
                with suppress(Exception):
                    opened.close()
            with suppress(Exception):
                self._nixl.remove_remote_agent(name)

    def _shut(self) -> None:
        self._ending = True
        latest = time.monotonic() + _CLOSE_SECONDS
        while not all(read.given_up for read in self._reads) and time.monotonic() < latest:
            self._poll()
            time.sleep(_READ_POLL)
        self._cut_off = bool(self._reads)
        for read in self._reads:
            with suppress(Exception):
                if read.copy is not None:
                    read.copy.wait()
            self._released(read)
            read.handle = None  # which knows the agent
        self._reads.clear()
        for name in list(self._peers):
            self._forget(name)
        with suppress(Exception):
            if self._registered is not None:
                self._nixl.deregister_memory(self._registered)
        del self._nixl  # the last one who knows it: UCX writes nothing from now on


def _device(layers: Sequence[LayerMemory]) -> int:
    return layers[0].device if layers else 0


def _descriptors(places: np.ndarray, sizes: np.ndarray, device: int) -> np.ndarray:
    """NIXL's list of pieces of memory."""
    return np.stack([places, sizes, np.full_like(places, device)], axis=1).astype(np.uint64)
