"""The protocol of LMCache's multiprocess server, as its version 0.5 speaks it: ZMQ frames that hold msgpack.

A question is [number, operation, arguments …], an answer [the same number, operation, result or nothing]; a question
that the server could not serve gets no answer. Objects are handed over in shared memory, see `SharedPool`; nothing that
the server sends is unpickled. Knows no block and no request of an engine.
"""

from __future__ import annotations

import itertools
import logging
import socket
import threading
import time
from typing import Any, TypeVar

import msgspec

from ..peer.options import Address

logger = logging.getLogger("frame.connectors.lmcache")

T = TypeVar("T")

_encode, _decode = msgspec.msgpack.encode, msgspec.msgpack.decode

#: The operations that frame uses, by the server's numbers for them.
OPERATIONS = {
    "lookup": 8,
    "query_prefetch_status": 9,
    "free_lookup_locks": 12,
    "end_session": 13,
    "register_kv_cache_engine_driven_context": 14,
    "unregister_kv_cache_engine_driven_context": 15,
    "prepare_store": 16,
    "commit_store": 17,
    "prepare_retrieve": 18,
    "commit_retrieve": 19,
    "get_chunk_size": 21,
}
#: Most bytes of a frame, and most frames of an answer, that are accepted.
MAX_FRAME = 1 << 20
MAX_FRAMES = 3
_NOTHING = _encode(None)


class LMCacheError(Exception):
    """The server is gone, is too slow, or breaks the protocol."""


class Key(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens [start, end) of a prompt, whose objects one worker, or with None each of `world_size`, stores.

    Objects are found by the tokens up to their end, `model_name` and `cache_salt`. The server remembers the hashes of
    a `request_id`'s tokens, so that another prompt must have another one. `num_kv_readers` retrieve an object.
    """

    model_name: str
    world_size: int
    worker_id: int | None
    token_ids: msgspec.Raw
    start: int
    end: int
    request_id: str
    cache_salt: str
    request_configs: None = None
    num_kv_readers: int = 1


class Registration(msgspec.Struct, frozen=True, kw_only=True):
    """What a client stores: objects of [num_layers, num_physical_slots, hidden_dim_size] values (with `use_mla`)."""

    instance_id: int
    model_name: str
    world_size: int
    block_size: int
    num_layers: int
    hidden_dim_size: int
    dtype_str: str
    use_mla: bool
    num_physical_slots: int


class Registered(msgspec.Struct, frozen=True):
    """The answer to a registration: the file of shared memory, "" where the server would have objects pickled."""

    shm_name: str = ""
    pool_size: int = 0


class Slot(msgspec.Struct, frozen=True):
    """Where an object lies in shared memory."""

    offset: int
    length: int
    dtype: str


class Slots(msgspec.Struct, frozen=True):
    """The objects of a range, or those numbered `chunk_indices` in it."""

    slots: list[Slot] | None = None
    chunk_indices: list[int] = []


class PreparedStore(msgspec.Struct, frozen=True):
    """The objects that are to be written; those that the server has already are not among them."""

    context: Slots


class PreparedRetrieve(msgspec.Struct, frozen=True):
    """The objects that may be read, all of the range or none."""

    success: bool
    context: Slots


class Client:
    """One connection, made when first needed and again after a failure. Any thread may call it; calls take turns.

    Raises `ValueError` where ZMQ is not installed.
    """

    def __init__(self, address: Address, *, timeout: float, retry: float) -> None:
        try:
            import zmq
        except ImportError:
            raise ValueError("the lmcache connector needs pyzmq: pip install 'frame-llm[lmcache]'") from None
        self._zmq = zmq
        self._address = address
        self._timeout = timeout
        self._retry = retry
        self._resting_until = 0.0
        self._connection: Any = None
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()

    @property
    def resting(self) -> bool:
        """Whether the server failed a moment ago and is not asked now."""
        return time.monotonic() < self._resting_until

    def call(self, operation: str, *arguments: Any, answer: type[T]) -> T:
        """Asks the server. Raises `LMCacheError`."""
        with self._lock:
            if self.resting:
                raise LMCacheError("it failed a moment ago")
            try:
                return self._call(OPERATIONS[operation], arguments, answer)
            except LMCacheError as error:
                self._hang_up()
                raise LMCacheError(f"{operation}: {error}") from None

    def fail(self, error: LMCacheError) -> None:
        """Leaves the server alone for a while, because it did what it should not."""
        if not self.resting:
            logger.warning("the LMCache server at %s gives no help: %s", self._address, error)
        self._resting_until = time.monotonic() + self._retry

    def close(self) -> None:
        """Hangs up, once the call under way has ended."""
        self._resting_until = float("inf")
        with self._lock:
            self._hang_up()

    def _call(self, operation: int, arguments: tuple[Any, ...], answer: type[T]) -> T:
        deadline, number = time.monotonic() + self._timeout, next(self._numbers)
        connection = self._connected()
        try:
            connection.send_multipart(
                [_encode(number), _encode(operation), *map(_encode, arguments)], self._zmq.NOBLOCK
            )
            while True:
                left = deadline - time.monotonic()
                if left <= 0 or not connection.poll(max(1, int(left * 1000))):
                    raise LMCacheError(f"no answer came within {self._timeout:g} seconds")
                frames = connection.recv_multipart(self._zmq.NOBLOCK)
                if not 2 <= len(frames) <= MAX_FRAMES:
                    raise LMCacheError(f"an answer of {len(frames)} frames came")
                if _decode(frames[0], type=int) == number:  # else it answers a question that was given up
                    break
            if _decode(frames[1], type=int) != operation:
                raise LMCacheError("the answer to another operation came")
            return _decode(frames[2] if len(frames) == MAX_FRAMES else _NOTHING, type=answer)
        except self._zmq.ZMQError as error:
            raise LMCacheError(str(error)) from None
        except msgspec.MsgspecError as error:
            raise LMCacheError(f"an answer that is not understood came: {error}") from None

    def _connected(self) -> Any:
        if self._connection is None:
            host, port = self._address.host, self._address.port
            try:  # ZMQ itself would not tell that nobody listens
                socket.create_connection((host, port), self._timeout).close()
            except OSError as error:
                raise LMCacheError(f"it cannot be reached: {error}") from None
            made: Any = self._zmq.Context.instance().socket(self._zmq.DEALER)
            made.setsockopt(self._zmq.LINGER, 0)
            made.setsockopt(self._zmq.MAXMSGSIZE, MAX_FRAME)
            made.setsockopt(self._zmq.IPV6, 1)
            made.connect(f"tcp://[{host}]:{port}" if ":" in host else f"tcp://{host}:{port}")
            self._connection = made
        return self._connection

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
