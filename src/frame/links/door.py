"""Where an engine lets in clients of other machines."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

from .greeting import Listener


class Door:
    """A listener at "tcp://HOST/NAME", any free port, for those who know `key` and say `NAME`; used like a socket."""

    def __init__(self, address: str, key: bytes) -> None:
        where = urlsplit(address)
        self._name = where.path
        self._listener = Listener(where.hostname or "", 0, key, "set --data-parallel-own-address to this machine's own")
        self.address = f"tcp://{where.netloc}:{self._listener.port}{where.path}"

    def accept(self) -> tuple[socket.socket, str]:
        """The next connection that has been greeted, and who it is; raises `OSError` once closed."""
        while (found := self._listener.next(None)) is not None:
            connection, said = found
            if said.get("engine") == self._name:
                return connection, self._name
            connection.close()  # of a client of an engine that had this port before
        raise ConnectionAbortedError(errno.ECONNABORTED, "the listener is closed")

    def shutdown(self, how: int) -> None:
        """Lets nobody in any more."""
        self._listener.close()

    def close(self) -> None:
        """Frees the port. May be called twice."""
        self._listener.close()
