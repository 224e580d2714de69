"""The one address of an engine that takes blocks: tells senders where the worker of their rank listens."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ..blocks.callers import Callers, listen
from .facts import Facts
from .inbox import MAX_CALLERS
from .wire import Placed, meet_caller

_HELLO_SECONDS = 5.0


class Door:
    """Answers until `close`. `facts` and `ports` are those of this engine's workers, by rank.

    Raises `ValueError` when the address cannot be used.
    """

    def __init__(
        self, host: str, port: int, *, secret: bytes, facts: Sequence[Facts], ports: Sequence[int], name: str = "push"
    ) -> None:
        self._secret = secret
        self._facts = dict(enumerate(facts))
        self._ports = list(ports)
        listener = listen(host, port, name)
        self.port = int(listener.getsockname()[1])
        self._callers = Callers(listener, self._serve, most=MAX_CALLERS, name=name)

    def close(self) -> None:
        """Closes all connections and the listener."""
        self._callers.close()

    def _serve(self, caller: socket.socket) -> None:
        meeting = meet_caller(caller, self._secret, self._facts, _HELLO_SECONDS)
        meeting.channel.send(Placed(self._ports[meeting.rank]), _HELLO_SECONDS)
