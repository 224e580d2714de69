"""Asks an LMCache server, in threads, how much of a prompt it has. Knows no request and no block of an engine.

A lookup makes the server keep what it found, for each worker to read once; what no worker will read is given back.
"""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from queue import SimpleQueue
from typing import Any

import msgspec

from .messages import Geometry, Prompt
from .options import LMCacheOptions
from .wire import Client, Key, LMCacheError, Registered, Registration

logger = logging.getLogger("frame.connectors.lmcache")

_THREADS = 4
#: Seconds after which the server is told again that this engine lives, before it is asked.
RENEW_SECONDS = 30.0
#: Most tokens of a server's chunk.
MAX_CHUNK = 1 << 20
_POLLS = (0.001, 0.002, 0.005, 0.01, 0.02)


class Lookup:
    """A question about `prompt`, open until its answer or its deadline. `units` are those that the server has."""

    def __init__(self, prompt: Prompt, geometry: Geometry, deadline: float) -> None:
        self.prompt = prompt
        self.geometry = geometry
        self.deadline = deadline
        self.units = 0
        self.chunks: int | None = None
        self._dropped = False
        self._lock = threading.Lock()

    @property
    def open(self) -> bool:
        """Whether an answer may still come in time."""
        return self.chunks is None and time.monotonic() < self.deadline

    def answer(self, chunks: int) -> bool:
        """Called once by the thread that asked; False when nobody waits for the answer any more."""
        with self._lock:
            self.chunks = 0 if self._dropped else chunks
            self.units = self.chunks // self.geometry.chunks
            return not self._dropped

    def lapse(self) -> None:
        """Called once the deadline is over: where no answer has come by now, the server has nothing."""
        with self._lock:
            if self.chunks is None:
                self._dropped, self.chunks = True, 0

    def drop(self) -> bool:
        """Called when nobody waits any more; True when an answer has come, whose chunks are to be given back."""
        with self._lock:
            self._dropped = True
            return self.chunks is not None

    def key(self, session: str, start: int, end: int) -> Key:
        """The key of tokens [start, end), for all workers."""
        return key_of(self.prompt, self.geometry, session, start, end, None)


class Lookups:
    """The threads that ask, and what is known of the server. `model` and `object_bytes` are as in `Geometry`."""

    def __init__(self, options: LMCacheOptions, world: int, grain: int) -> None:
        self._options = options
        self._world = world
        self._grain = grain
        self._clients = SimpleQueue[Client]()
        self._all = [
            Client(options.address(), timeout=options.timeout_seconds, retry=options.retry_seconds)
            for _ in range(_THREADS)
        ]
        for client in self._all:
            self._clients.put(client)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="lmcache-lookup")
        self._instance = new_instance()
        self._contact = threading.Lock()
        self._model: Callable[[int], tuple[str, int]] | None = None
        self._renewed = -float("inf")
        self._seeking: Future[None] | None = None
        self._resting_until = 0.0
        self._closed = False
        self.geometry: Geometry | None = None

    def start(self, model: Callable[[int], tuple[str, int]]) -> None:
        """Meets the server, or tells that it cannot be met yet.

        `model` gives, for the tokens of a chunk, the name and the size of objects; see `Geometry`.
        """
        self._model = model
        self._run(self._meet)

    def ask(self, prompt: Prompt) -> Lookup | None:
        """Begins a lookup; None when the server cannot be asked now."""
        geometry = self.geometry
        if geometry is None or prompt.unit != geometry.unit or self._resting:
            return None
        lookup = Lookup(prompt, geometry, time.monotonic() + self._options.lookup_seconds)
        self._threads.submit(self._run, lambda client: self._look(client, lookup), lambda: lookup.answer(0))
        return lookup

    def seek(self) -> None:
        """Tries to meet a server that is not known yet, beside the engine."""
        if self.geometry is None and not self._resting and (self._seeking is None or self._seeking.done()):
            self._seeking = self._threads.submit(self._run, self._meet)

    def settle(self, lookup: Lookup, used: range) -> None:
        """Gives back what was found but for the units `used`, which each worker reads or gives back; later ones wait.

        With none used the lookup ends.
        """
        if not lookup.drop() or not lookup.chunks:
            return  # the thread that asks gives back what it finds
        unit, found = lookup.geometry.unit, lookup.chunks * lookup.geometry.chunk
        ranges = [(0, used.start * unit), (used.stop * unit, found)] if used else [(0, found)]
        self._submit(lambda client: self._give_back(client, lookup, ranges, ends=not used))

    def end(self, lookup: Lookup) -> None:
        """Ends a lookup of which some units were used."""
        self._submit(lambda client: self._end(client, lookup))

    def close(self) -> None:
        """Hangs up."""
        self._closed = True
        self._threads.shutdown(wait=True)
        if self.geometry is not None and not self._resting:
            self._run(self._leave)
        for client in self._all:
            client.close()

    @property
    def _resting(self) -> bool:
        return time.monotonic() < self._resting_until

    def _submit(self, job: Callable[[Client], None]) -> None:
        if not self._closed:
            self._threads.submit(self._run, job)

    def _run(self, job: Callable[[Client], None], otherwise: Callable[[], object] = lambda: None) -> None:
        """Has a client do something, or `otherwise` while the server rests, as it does for a while after a failure."""
        client = self._clients.get()
        try:
            if self._resting:
                otherwise()
            else:
                job(client)
        except LMCacheError as error:
            client.fail(error)
            self._rest()
        except Exception:
            logger.exception("a lookup failed")
        finally:
            self._clients.put(client)

    def _look(self, client: Client, lookup: Lookup) -> None:
        chunks = 0
        try:
            self._meet(client)
            if self.geometry == lookup.geometry:
                chunks = self._found(client, lookup)
        finally:
            wanted = lookup.answer(chunks)
        if not (wanted and chunks):
            self._give_back(client, lookup, [(0, chunks * lookup.geometry.chunk)], ends=True)

    def _found(self, client: Client, lookup: Lookup) -> int:
        most = len(lookup.prompt.units) * lookup.geometry.chunks
        session = lookup.prompt.session
        key = lookup.key(session, 0, most * lookup.geometry.chunk)
        client.call("lookup", key, self._world, answer=type(None))
        deadline, polls = lookup.deadline, iter(_POLLS)
        while True:
            found: Any = client.call("query_prefetch_status", session, answer=int | None)  # type: ignore[arg-type]
            if found is not None:
                break
            if time.monotonic() > deadline:  # what it finds later it keeps until its own deadline
                return 0
            time.sleep(next(polls, _POLLS[-1]))
        if not 0 <= found <= most:
            raise LMCacheError(f"it has {found} of {most} chunks")
        return int(found)

    def _give_back(self, client: Client, lookup: Lookup, ranges: Sequence[tuple[int, int]], *, ends: bool) -> None:
        session = lookup.prompt.session
        for start, end in ranges:
            if start < end:
                client.call("free_lookup_locks", lookup.key(session, start, end), self._world, answer=type(None))
        if ends:
            self._end(client, lookup)

    def _end(self, client: Client, lookup: Lookup) -> None:
        client.call("end_session", lookup.prompt.session, answer=type(None))

    def _meet(self, client: Client) -> None:
        """Learns how long the server's chunks are, and tells it what is stored, so that it looks for that."""
        with self._contact:
            if self._model is None or time.monotonic() < self._renewed + RENEW_SECONDS:
                return
            if self._resting:
                raise LMCacheError("it failed a moment ago")
            try:
                geometry = self._introduce(client, self._model)
            except LMCacheError:
                self._rest()
                raise
            self._renewed = time.monotonic()
            if geometry != self.geometry:
                logger.info(
                    "the LMCache server at %s keeps chunks of %d tokens; %d tokens are stored together",
                    self._options.server, geometry.chunk, geometry.unit,
                )  # fmt: skip
            self.geometry = geometry

    def _introduce(self, client: Client, model: Callable[[int], tuple[str, int]]) -> Geometry:
        chunk = client.call("get_chunk_size", answer=int)
        if not 0 < chunk <= MAX_CHUNK:
            raise LMCacheError(f"its chunks have {chunk} tokens")
        name, size = model(chunk)
        geometry = Geometry(model=name, chunk=chunk, grain=self._grain, world=self._world, object_bytes=size)
        register(client, geometry, self._instance)
        return geometry

    def _rest(self) -> None:
        self._resting_until = time.monotonic() + self._options.retry_seconds
        self._renewed = -float("inf")

    def _leave(self, client: Client) -> None:
        client.call("unregister_kv_cache_engine_driven_context", self._instance, answer=type(None))


def new_instance() -> int:
    """A number by which a server knows a client; two clients must not have one."""
    return secrets.randbits(62)


def new_session() -> str:
    """The name of a session; see `Key`."""
    return f"frame-{secrets.token_hex(12)}"


def register(client: Client, geometry: Geometry, instance: int) -> Registered:
    """Tells the server what is stored; it may be told again. Raises `LMCacheError`."""
    registration = Registration(
        instance_id=instance,
        model_name=geometry.model,
        world_size=geometry.world,
        block_size=geometry.chunk,
        num_layers=1,
        hidden_dim_size=geometry.object_bytes,
        dtype_str="uint8",
        use_mla=True,
        num_physical_slots=1,
    )
    return client.call("register_kv_cache_engine_driven_context", registration, answer=Registered)


def key_of(prompt: Prompt, geometry: Geometry, session: str, start: int, end: int, worker: int | None) -> Key:
    """The key of tokens [start, end) of a prompt."""
    return Key(
        model_name=geometry.model,
        world_size=geometry.world,
        worker_id=worker,
        token_ids=msgspec.Raw(prompt.tokens),
        start=start,
        end=end,
        request_id=session,
        cache_salt=prompt.salt,
    )
