"""The blocks that a prefill engine keeps for decode engines, and for how long. Knows no socket and no tensor.

A block that another engine reads must not be given to a request here. So nobody reads without a lease, which ends by
this engine's clock, counted from when it was asked for; the reader counts from before it asked, so its end is earlier.
"""

from __future__ import annotations

import hmac
import secrets
import threading
import time
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from frame.interfaces import KVLayout

from .messages import TICKET_BYTES, Notice, digest

#: How often one lease can be renewed: a reader that hangs must not keep blocks for ever.
MAX_RENEWALS = 20
#: Leases of one request's blocks at a time.
_MAX_LEASES = 8
#: How long a reader waits until blocks that were computed just now can be read.
_GIVEN_SECONDS = 1.0


@dataclass
class Hold:
    """The blocks of a request that ended; `leases` are the open ones: the readers that have read all, by ticket.

    They may be read once no rank of `awaits` has still to give them to its agent.
    """

    content: bytes
    token_ids: array[int]
    blocks: list[list[int]]
    deadline: float
    leases: dict[bytes, set[Notice]] = field(default_factory=dict)
    renewals: int = 0
    count: int = 0  # of its blocks of tokens
    states: int = 0
    awaits: set[int] = field(default_factory=set)
    done: bool = False  # somebody has read it, or needs it no more


class Holds:
    """See the module. Any thread may call it."""

    def __init__(
        self,
        layout: KVLayout,
        seconds: float,
        max_blocks: int,
        clock: Callable[[], float] = time.monotonic,
        max_states: int = 0,
    ) -> None:
        self._layout = layout
        self._seconds = seconds
        self._max_blocks = max_blocks
        self._max_states = max_states
        self._groups = [index for index, group in enumerate(layout.groups) if group.keeps_states]
        self._clock = clock
        self._holds: dict[str, Hold] = {}
        self._count = self._states = 0
        self._owners: dict[bytes, str] = {}  # of open leases, by ticket
        self._lock = threading.Condition()

    @property
    def num_blocks(self) -> int:
        """Blocks that are kept, one that several requests share counted for each."""
        return self._count + self._states

    def add(
        self,
        request_id: str,
        content: bytes,
        token_ids: Sequence[int],
        blocks: list[list[int]],
        awaits: Sequence[int] = (),
    ) -> bool:
        """Keeps the blocks of `token_ids`, which ranks `awaits` must give first; False where too many are kept."""
        with self._lock:
            states = sum(len(blocks[group]) for group in self._groups)
            count = sum(1 for group in blocks for block in group if block) - states
            full = self._count + count > self._max_blocks or self._states + states > self._max_states
            if full or request_id in self._holds:
                return False
            self._count, self._states = self._count + count, self._states + states
            deadline = self._clock() + self._seconds
            tokens = array("i", token_ids)
            hold = Hold(content, tokens, blocks, deadline, count=count, states=states, awaits=set(awaits))
            self._holds[request_id] = hold
            return True

    def given(self, request_id: str, rank: int) -> None:
        """Called when others can read a request's blocks on that rank."""
        with self._lock:
            if request_id in self._holds:
                self._holds[request_id].awaits.discard(rank)
                self._lock.notify_all()

    def lease(self, request_id: str, num_tokens: int, shown: bytes) -> tuple[bytes, list[list[int]], float] | None:
        """Returns (ticket, blocks, seconds) where the caller knows the tokens; None where it may read nothing."""
        with self._lock:
            hold = self._known(request_id, num_tokens, shown)
            if hold is not None and hold.awaits:
                awaits = hold.awaits
                self._lock.wait_for(lambda: not awaits, _GIVEN_SECONDS)
                hold = self._known(request_id, num_tokens, shown)
            if hold is None or hold.awaits or len(hold.leases) >= _MAX_LEASES:
                return None
            grain = self._layout.grain
            if self._groups and num_tokens != len(hold.token_ids) // grain * grain:
                return None  # its state stands for other tokens
            ticket = secrets.token_bytes(TICKET_BYTES)
            hold.leases[ticket] = set()
            self._owners[ticket] = request_id
            hold.deadline = self._clock() + self._seconds
            groups = zip(hold.blocks, self._layout.groups, strict=True)
            return ticket, [blocks[: group.blocks_for(num_tokens)] for blocks, group in groups], self._seconds

    def renew(self, ticket: bytes) -> float | None:
        """Seconds for which an open lease goes on; None where it ends."""
        with self._lock:
            hold = self._holds.get(self._owners.get(ticket, ""))
            if hold is None or hold.deadline <= self._clock() or hold.renewals >= MAX_RENEWALS:
                return None
            hold.renewals += 1
            hold.deadline = self._clock() + self._seconds
            return self._seconds

    def release(self, request_id: str, num_tokens: int, shown: bytes, ticket: bytes) -> None:
        """The caller needs the blocks no more; ignored for one that does not know the tokens."""
        with self._lock:
            hold = self._known(request_id, num_tokens, shown)
            if hold is not None:
                self._close(hold, ticket)

    def read(self, notice: Notice) -> None:
        """Called when one of a lease's readers has read all; an unknown ticket is ignored.

        The blocks go back once all have: each rank's are read by some of them.
        """
        with self._lock:
            hold = self._holds.get(self._owners.get(notice.ticket, ""))
            if hold is None or notice.reader >= notice.num_readers:
                return
            read = hold.leases[notice.ticket]
            if all(one.num_readers == notice.num_readers for one in read):
                read.add(notice)
            if len(read) == notice.num_readers:
                self._close(hold, notice.ticket)

    def collect(self) -> list[str]:
        """Ids of the requests whose blocks nobody reads any more; they are forgotten."""
        with self._lock:
            now = self._clock()
            found = [
                name for name, hold in self._holds.items() if hold.deadline <= now or (hold.done and not hold.leases)
            ]
            for name in found:
                hold = self._holds.pop(name)
                self._count, self._states = self._count - hold.count, self._states - hold.states
                for ticket in hold.leases:
                    del self._owners[ticket]
            return found

    def clear(self) -> bool:
        """Lets no blocks be read any more; False, without a change, while some are read."""
        with self._lock:
            now = self._clock()
            if any(hold.leases and hold.deadline > now for hold in self._holds.values()):
                return False
            for hold in self._holds.values():
                hold.deadline = now
            return True

    def _known(self, request_id: str, num_tokens: int, shown: bytes) -> Hold | None:
        hold = self._holds.get(request_id)
        if hold is None or hold.deadline <= self._clock():
            return None
        if not 0 < num_tokens <= len(hold.token_ids):
            return None
        if not hmac.compare_digest(shown, digest(hold.content, hold.token_ids[:num_tokens])):
            return None
        return hold

    def _close(self, hold: Hold, ticket: bytes) -> None:
        if hold.leases.pop(ticket, None) is not None:
            del self._owners[ticket]
        hold.done = True
