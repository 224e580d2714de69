"""A decode engine's connections to prefill engines: made when first needed, kept, and rested after a failure."""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from frame.interfaces import encode
from frame.quoting import printable

from ..blocks.callers import hang_up
from ..blocks.remote import port_of, text_of
from ..blocks.wire import PeerError
from .maps import check_orders, groups_of, pieces
from .messages import Fit
from .shapes import Facts, difference
from .wire import Answer, Channel, Done, Granted, Introduce, Met, Question, Refused, Renewed, call

logger = logging.getLogger("frame.connectors.nixl")

T = TypeVar("T")

_MAX_LINKS, _MAX_TOLD = 256, 64


@dataclass(frozen=True)
class Source:
    """Where a request's parameters say that its prompt was computed."""

    engine: str
    request: str
    host: str
    port: int

    @classmethod
    def of(cls, params: Mapping[str, Any]) -> Source:
        """From the parameters of a request; raises `ParamsError` where they lack something, or name it wrongly."""
        engine, request, host = (text_of(params, f"remote_{name}") for name in ("engine_id", "request_id", "host"))
        return cls(engine, request, host, port_of(params, "remote_port"))


@dataclass(frozen=True)
class Acquaintance:
    """What is known of another engine: `fit` is for the workers, `groups` are pairs of groups that share layers.

    The first of these is this engine's.
    """

    theirs: Facts
    fit: bytes
    groups: Sequence[tuple[int, int]]


class Link:
    """The connection to one prefill engine. Any thread may ask; one waits for the other.

    `tell` is called with why there is no connection, or "" when there is one. Once there was one, `met` is what is
    known of the other engine.
    """

    def __init__(
        self,
        source: Source,
        secret: bytes,
        facts: Facts,
        *,
        timeout: float,
        retry: float,
        tell: Callable[[Source, str], None],
    ) -> None:
        self._source = source
        self._tell = tell
        self._secret = secret
        self._facts = facts
        self._timeout = timeout
        self._retry = retry
        self._connection: socket.socket | None = None
        self._channel: Channel | None = None
        self._rests_until = 0.0
        self.met: Acquaintance | None = None
        self._lock = threading.Lock()
        self._closed = False

    @property
    def is_open(self) -> bool:
        """Whether there is a connection: over it the last question was answered, if only by a refusal."""
        return self._channel is not None

    def ask(self, question: Question, kind: type[T]) -> T:
        """The answer. Raises `PeerError`, at once while it rests after a failure, and where the answer is no."""
        with self._lock:
            if time.monotonic() < self._rests_until or self._closed:
                raise PeerError("it rests after a failure")
            kept = self._channel is not None
            try:
                answer = self._ask(question)
            except PeerError:
                self._drop()
                if not kept or self._closed:
                    raise
                answer = self._ask(question)  # the connection that was kept had ended meanwhile
        if isinstance(answer, Refused):
            raise PeerError(answer.reason)
        if not isinstance(answer, kind):
            raise PeerError(f"it answered with {type(answer).__name__}")
        return answer

    def close(self) -> None:
        """Ends the connection; a thread that waits for an answer stops waiting."""
        self._closed = True
        connection = self._connection
        if connection is not None:
            hang_up(connection)

    def _ask(self, question: Question) -> Answer:
        try:
            channel = self._channel or self._connect()
            channel.send(question, self._timeout)
            answer: Answer = channel.receive(Refused | Done | Renewed | Granted, self._timeout)
            return answer
        except PeerError as error:
            self._rest(str(error))
            raise

    def _connect(self) -> Channel:
        place = (self._source.host, self._source.port)
        try:
            self._connection = socket.create_connection(place, timeout=self._timeout)
        except (OSError, UnicodeError) as error:  # the latter of a name that none can have
            raise PeerError(f"no connection: {getattr(error, 'strerror', None) or error}") from None
        if self._closed:
            raise PeerError("it was closed")  # between the check and now, so that it found no connection to end
        channel = call(self._connection, self._secret, self._timeout)
        channel.send(Introduce(self._source.engine, self._facts), self._timeout)
        answer: Met | Refused = channel.receive(Met | Refused, self._timeout)
        if isinstance(answer, Refused):
            raise PeerError(answer.reason)
        if (differs := difference(answer.facts, self._facts)) is not None:
            raise PeerError(f"the engines differ in {differs}")
        try:
            check_orders(answer.facts, self._facts)
            found = [pieces(answer.facts, self._facts, rank) for rank in range(len(self._facts.ranks))]
        except ValueError as error:
            raise PeerError(f"the engines differ in {error}") from None
        self.met = Acquaintance(answer.facts, encode(Fit(answer.facts, found)), groups_of(answer.facts, self._facts))
        self._channel = channel
        self._tell(self._source, "")
        return channel

    def _rest(self, reason: str) -> None:
        if self._channel is None:  # a connection that was kept is made anew first
            self._rests_until = time.monotonic() + self._retry
            if not self._closed:
                self._tell(self._source, reason)
        self._drop()

    def _drop(self) -> None:
        if self._connection is not None:
            hang_up(self._connection)
        self._connection = self._channel = None


class Links:
    """One link for each prefill engine; those unused for longest go when there are too many."""

    def __init__(self, secret: bytes, facts: Facts, *, timeout: float, retry: float) -> None:
        self._make = lambda source: Link(source, secret, facts, timeout=timeout, retry=retry, tell=self._tell)
        self._told: set[tuple[str, int, str]] = set()
        self._links: OrderedDict[tuple[str, str, int], Link] = OrderedDict()
        self._lock, self._tell_lock = threading.Lock(), threading.Lock()

    def to(self, source: Source) -> Link:
        """The link to the engine that a source names."""
        key = (source.engine, source.host, source.port)
        with self._lock:
            if key not in self._links:
                self._links[key] = self._make(source)
                if len(self._links) > _MAX_LINKS:
                    self._links.popitem(last=False)[1].close()
            self._links.move_to_end(key)
            return self._links[key]

    def close(self) -> None:
        """Ends all connections."""
        with self._lock:
            for link in self._links.values():
                link.close()

    def _tell(self, source: Source, reason: str) -> None:
        """Logs why an address gives nothing, once until it gives something; not all, as clients say what is tried."""
        place = (source.host, source.port)
        with self._tell_lock:
            if not reason:
                self._told = {told for told in self._told if told[:2] != place}
            elif (*place, reason) not in self._told and len(self._told) < _MAX_TOLD:
                self._told.add((*place, reason))
                logger.warning(
                    "no KV blocks come from the engine at %s:%d: %s; prompts are computed here",
                    printable(source.host),
                    source.port,
                    reason,
                )
