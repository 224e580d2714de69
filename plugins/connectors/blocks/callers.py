"""The callers of a listening socket, each answered in a thread of its own. Knows no protocol but its `PeerError`."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress

from frame.links.lost import end_when_lost
from frame.quoting import shortened

from .wire import PeerError

_PAUSE_SECONDS = 0.1


class Callers:
    """Accepts callers until `close`; beyond `most` connections at a time further ones are closed at once.

    `answer` is called with each connection; it ends when that returns or raises `PeerError`. `end` has that come about
    when all are closed. `name` is the connector's, for threads and the log.
    """

    def __init__(
        self,
        listener: socket.socket,
        answer: Callable[[socket.socket], None],
        *,
        most: int,
        name: str,
        end: Callable[[socket.socket], None] | None = None,
    ) -> None:
        self._listener = listener
        self._answer = answer
        self._end = end or shut_down
        self._most = most
        self._name = name
        self._logger = logging.getLogger(f"frame.connectors.{name}")
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._accept, name=f"{name}-listener", daemon=True)
        self._thread.start()

    def close(self) -> bool:
        """Closes the listener and all connections; False, without doing anything, where it was called before."""
        with self._lock:
            if self._closed.is_set():
                return False
            self._closed.set()
            callers = list(self._open)
        shut_down(self._listener)
        for one in callers:
            self._end(one)  # the thread that waits on it closes it
        self._thread.join()
        return True

    def _accept(self) -> None:
        while not self._closed.is_set():
            try:
                caller, _ = self._listener.accept()
            except OSError as error:  # this caller is gone, or this process has too many files open; others may come
                self._logger.debug("a caller of the %s connector was not accepted: %s", self._name, error)
                self._closed.wait(_PAUSE_SECONDS)
                continue
            with self._lock:
                full = self._closed.is_set() or len(self._open) >= self._most
                if not full:
                    self._open.add(caller)
            if full:
                hang_up(caller)
            else:
                self._begin(caller)
        self._listener.close()

    def _begin(self, caller: socket.socket) -> None:
        try:
            threading.Thread(target=self._serve, args=(caller,), name=f"{self._name}-caller", daemon=True).start()
        except RuntimeError as error:  # this process may have no further thread; others may be answered later
            self._logger.debug("a caller of the %s connector is not answered: %s", self._name, error)
            with self._lock:
                self._open.discard(caller)
            hang_up(caller)

    def _serve(self, caller: socket.socket) -> None:
        try:
            with suppress(OSError):  # it is gone already, or of this machine
                end_when_lost(caller)
            self._answer(caller)
        except (PeerError, OSError) as error:  # the latter where `close` has come between
            self._logger.debug("a caller of the %s connector: %s", self._name, error)
        finally:
            with self._lock:
                self._open.discard(caller)
            caller.close()


def listen(host: str, port: int, name: str, option: str = "port") -> socket.socket:
    """A listener of the connector `name`; port 0: any free one. Raises `ValueError` when the address cannot be used.

    `host` is the setting `kv_ip`, and `option` the connector's that chose the port.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family)
    except (OSError, UnicodeError) as error:  # the latter of a name that none can have
        number = None if isinstance(error, UnicodeError | socket.gaierror) else error.errno
        why = str(getattr(error, "strerror", None) or error) if number is None else os.strerror(number)
        flags = "--kv-ip" + f" or --plugin.{name}.{option}" * bool(port)
        raise ValueError(
            f"the {name} connector cannot listen on {shortened(host)}:{port}: {why}; choose another {flags}"
        ) from None


def is_over(connection: socket.socket) -> bool:
    """Whether a connection has ended on which the other side says nothing now."""
    watch = select.poll()
    watch.register(connection, select.POLLIN)
    return bool(watch.poll(0))


def fall_silent(connection: socket.socket) -> None:
    """Says nothing on a connection any more, so that the other side hears that it has ended; hears what that says."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_WR)


def stop_hearing(connection: socket.socket) -> None:
    """Wakes the thread that waits to hear something; the other side is not told."""
    with suppress(OSError):
        connection.shutdown(socket.SHUT_RD)


def await_end(connection: socket.socket, seconds: float | None) -> bool:
    """Falls silent; whether the other side hangs up within `seconds`; what it says until then is passed over.

    None: waits for that without a limit.
    """
    fall_silent(connection)
    latest = None if seconds is None else time.monotonic() + seconds
    try:
        while True:
            connection.settimeout(None if latest is None else max(latest - time.monotonic(), 1e-3))
            if not connection.recv(1 << 16):
                return True
    except TimeoutError:
        return False
    except OSError:
        return True


def hang_up(connection: socket.socket) -> None:
    """Closes a connection that another thread may be waiting on."""
    shut_down(connection)
    connection.close()


def shut_down(connection: socket.socket) -> None:
    """Wakes the thread that waits on a connection or listener; it stays open, and its number is nobody else's."""
    with suppress(OSError):  # it was never connected, or is closed already
        connection.shutdown(socket.SHUT_RDWR)
