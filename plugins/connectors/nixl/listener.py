"""Answers decode engines that ask for a request's blocks: who fits, what may be read, and for how long."""

from __future__ import annotations

import socket
from collections.abc import Callable

from ..blocks.callers import Callers, listen
from .holds import Holds
from .messages import AgentFacts
from .shapes import Facts, difference
from .wire import (
    Answer,
    Channel,
    Done,
    Granted,
    Introduce,
    Lease,
    Met,
    Question,
    Refused,
    Release,
    Renew,
    Renewed,
    answer_call,
)

#: Connections at a time; further ones are closed at once.
MAX_CALLERS = 256
_SEND_SECONDS = 5.0


class NixlListener:
    """Answers until `close`. `agents` gives those of this engine's workers by rank, as they are now.

    Raises `ValueError` when the address cannot be used.
    """

    def __init__(
        self,
        host: str,
        port: int,
        *,
        secret: bytes,
        engine: str,
        facts: Facts,
        holds: Holds,
        agents: Callable[[], list[AgentFacts]],
    ) -> None:
        self._secret = secret
        self._engine = engine
        self._facts = facts
        self._holds = holds
        self._agents = agents
        listener = listen(host, port, "nixl")
        self.port = int(listener.getsockname()[1])
        self._callers = Callers(listener, self._serve, most=MAX_CALLERS, name="nixl")

    def close(self) -> None:
        """Closes all connections and the listener."""
        self._callers.close()

    def _serve(self, caller: socket.socket) -> None:
        channel = answer_call(caller, self._secret)
        if self._introduced(channel):
            while True:
                question: Question = channel.receive(Lease | Renew | Release, None)
                channel.send(self._answer(question), _SEND_SECONDS)

    def _introduced(self, channel: Channel) -> bool:
        """Nothing of this engine's memory is told before the caller is known to fit."""
        caller: Introduce = channel.receive(Introduce, _SEND_SECONDS)
        wrong = "it is another engine" if caller.engine != self._engine else None
        if wrong is None and (differs := difference(self._facts, caller.facts)) is not None:
            wrong = f"the engines differ in {differs}"
        channel.send(Met(self._facts) if wrong is None else Refused(wrong), _SEND_SECONDS)
        return wrong is None

    def _answer(self, question: Question) -> Answer:
        holds = self._holds
        if isinstance(question, Lease):
            granted = holds.lease(question.request, question.num_tokens, question.digest)
            if granted is None:
                return Refused("no such blocks are kept")
            ticket, blocks, seconds = granted
            return Granted(ticket, seconds, blocks, self._agents())
        if isinstance(question, Renew):
            more = holds.renew(question.ticket)
            return Refused("the lease has ended") if more is None else Renewed(more)
        if isinstance(question, Release):
            holds.release(question.request, question.num_tokens, question.digest, question.ticket)
        return Done()
