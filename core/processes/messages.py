"""The messages between the processes of a server, as typed structs.

Four conversations: a client and its engine (requests, outputs, calls); an engine and its supervisor (start-up); the
supervisor and an API process (whether there is an engine, and if not, why; how many there should be); a server and
another machine that starts engines for it (whether there are, and what becomes of those that share experts).
"""

from __future__ import annotations

from typing import Any

import msgspec

from frame.links.fate_messages import FateNews, FateOrder
from frame.served.news import AdapterNews

from ..interfaces.client import EngineInfo
from ..interfaces.engine import EngineOutput, EngineRequest, Fault

#: Seconds for reading the last messages of an engine that has ended.
LAST_WORDS_SECONDS = 5.0


class Hello(msgspec.Struct, tag=True):
    """Client to engine, first: the client's id. The engine closes an older connection of the same client."""

    name: str


class Add(msgspec.Struct, tag=True):
    """Client to engine: start a request."""

    request: EngineRequest


class Abort(msgspec.Struct, tag=True):
    """Client to engine: end requests; unknown ids are ignored."""

    request_ids: list[str]


class Call(msgspec.Struct, tag=True):
    """Client to engine: a control method by name ("stats" reads the counters); answered by `Reply` with its id."""

    id: int
    method: str
    arguments: dict[str, Any] | None = None


class Outputs(msgspec.Struct, tag=True):
    """Engine to client: what one step added to this client's requests."""

    outputs: list[EngineOutput]


class Reply(msgspec.Struct, tag=True):
    """Engine to client: the answer to a `Call`; `value` is msgpack, `error` one sentence when it failed."""

    id: int
    value: bytes = b""
    error: str | None = None


class Stage(msgspec.Struct, tag=True):
    """A stage of the start-up of engine `rank` has begun; `seconds` since the process started."""

    name: str
    seconds: float
    rank: int = 0


class Prepared(msgspec.Struct, tag=True):
    """Engine to supervisor: libraries are loaded and the configuration is possible; it waits for `Begin`."""


class Ready(msgspec.Struct, tag=True):
    """Engine to supervisor: it listens at `address` now."""

    info: EngineInfo
    address: str


class Weights(msgspec.Struct, tag=True):
    """Engine to supervisor: it serves other weights (see `with_weights`); the next engine must load these."""

    source: dict[str, str | None]


class Failed(msgspec.Struct, tag=True):
    """The start-up failed, or the process gives up; `error` is the root cause in one sentence.

    `killed`: a worker process was ended by SIGKILL; `refused`: what was asked for is impossible.
    """

    error: str
    killed: bool = False
    refused: bool = False


class Begin(msgspec.Struct, tag=True):
    """Supervisor to an engine process: build the engine. Earlier deaths tell about requests, by their journal names.

    Each of the groups of `suspects` is computed alone, one after the other; a request in `guilty` killed earlier
    engines and ends with the error that stands there.
    """

    suspects: list[list[str]] = []
    guilty: dict[str, str] = {}


class Wave(msgspec.Struct, tag=True):
    """Engine to supervisor: engines that share experts must begin this wave of steps. And back to each of them."""

    number: int


class Rest(msgspec.Struct, tag=True):
    """Supervisor to engine: hold all requests back from now on, and say when no step is under way. And the answer."""


class EngineUp(msgspec.Struct, tag=True):
    """Supervisor to clients: engine `rank` listens at `address`, a Unix socket or "tcp://HOST:PORT/NAME"."""

    address: str
    info: EngineInfo
    rank: int = 0


class EngineDown(msgspec.Struct, tag=True):
    """Supervisor to clients: there is no engine `rank` now; `final` when none will be started again.

    `away`: its whole machine is gone, so that its requests go to other engines; it may come back.
    """

    error: str
    final: bool = False
    rank: int = 0
    away: bool = False


class Engines(msgspec.Struct, tag=True):
    """Supervisor to clients: there will be `size` engines, none of which is there yet; those before have ended."""

    size: int
    error: str


class Scale(msgspec.Struct, tag=True):
    """API process to supervisor: serve with `size` engines that share experts."""

    size: int


class Scaled(msgspec.Struct, tag=True):
    """Supervisor to API process: the answer to `Scale`; where `error` says why not, `fault` whose fault it is."""

    changed: bool = False
    error: str = ""
    fault: Fault = "engine"


class Scaling(msgspec.Struct, tag=True):
    """Supervisor to API processes, also to those that start meanwhile: whether the number of engines changes."""

    under_way: bool


class Admitted(msgspec.Struct, tag=True):
    """Server to another machine: it may start its engines."""


class Refused(msgspec.Struct, tag=True):
    """Server to another machine: it may not, for this reason; `later`: perhaps when it asks again."""

    reason: str
    later: bool = False


class Dismissed(msgspec.Struct, tag=True):
    """Server to another machine: the server ends, and so should the engines."""


class Serving(msgspec.Struct, tag=True):
    """API process to supervisor: it answers HTTP requests, under these model names."""

    model_names: list[str]


class Shutdown(msgspec.Struct, tag=True):
    """API process to supervisor: an operator asks the server to drain and end."""


#: the messages of each direction
ToEngine = Hello | Add | Abort | Call
FromEngine = Outputs | Reply
EngineReport = Stage | Prepared | Ready | Failed | Weights | Wave | Rest
EngineOrder = Begin | Wave | Rest
EngineNews = Stage | EngineUp | EngineDown | Engines
ClientNews = EngineNews | Scaling
MachineNews = Stage | EngineUp | EngineDown | Failed | FateNews
MachineOrder = Admitted | Refused | Dismissed | FateOrder
ApiReport = Serving | Failed | Shutdown | Scale | AdapterNews
ApiOrder = ClientNews | Scaled | AdapterNews
