"""The life of an engine process: imports, waits for `Begin`, builds the engine, serves, closes."""

from __future__ import annotations

import contextlib
import gc
import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from frame.links.door import Door
from frame.ranks.standstill import StandingNotes

from ..config.tree import FrameConfig
from ..interfaces.executor import DeadWorkerError
from ..plugin_host.setups import mesh_of
from .channel import Channel, listen
from .child_process import describe, die_with_parent, show_as, switch_often
from .engine_host import EngineHost
from .journal import Journal, NullJournal
from .messages import Begin, EngineOrder, EngineReport, Failed, Prepared, Ready, Stage, Wave

if TYPE_CHECKING:
    from ..engine.engine import Engine

logger = logging.getLogger("frame.server")

#: Seconds that the engine gets to close when its parent is gone.
_CLOSE_SECONDS = 5.0

#: Imports what an engine of a configuration needs without touching a device; returns the function that builds the
#: engine. Calls back with the name of each stage that begins.
EngineFactory = Callable[[FrameConfig, Callable[[str], None]], Callable[[], "Engine"]]


class EngineProcess:
    """One engine process. It builds its engine when the supervisor sends `Begin`, perhaps long after its start."""

    def __init__(
        self, config: FrameConfig, address: str, control_fd: int, prepare: EngineFactory, journal_fd: int | None = None
    ) -> None:
        self._config = config
        self._journal = NullJournal() if journal_fd is None else Journal(journal_fd)
        self._address = address
        self._parent = Channel(socket.socket(fileno=control_fd), EngineOrder)
        self._orders: SimpleQueue[Begin] = SimpleQueue()
        self._inbox: SimpleQueue[Any] = SimpleQueue()  # of the host, also before there is one
        self._prepare = prepare
        self._started = time.monotonic()
        self._host: EngineHost | None = None

    def run(self) -> int:
        """Returns the exit status."""
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles ctrl-C
        signal.signal(signal.SIGTERM, lambda *_: self._stop())
        show_as("frame-standby")
        self._silence_logs(at_least=logging.ERROR)  # choices are logged again, warnings have been: see `Standby`
        die_with_parent()
        threading.Thread(target=self._listen, name="parent", daemon=True).start()
        try:
            build = self._prepare(
                self._config, lambda stage: self._report(Stage(stage, time.monotonic() - self._started))
            )
            self._report(Prepared())
            begin = self._orders.get()
            engine = build()
        except Exception as error:
            logger.debug("the engine does not start", exc_info=True)
            self._report(Failed(describe(error), refused=isinstance(error, ValueError)))
            return 1
        with contextlib.ExitStack() as undo:
            undo.callback(engine.close)
            try:
                gc.freeze()  # what exists now stays: collecting it again would delay steps by a fifth of a second
                if mesh_of(self._config).data > 1:
                    engine.step_with_peers(lambda number: self._report(Wave(number)))
                    undo.callback(StandingNotes(self._journal, engine.progress).close)
                listener = self._open()
                self._host = EngineHost(engine, listener, self._journal, begin, self._report, self._inbox)
                self._report(Ready(engine.info, self._address))
                switch_often()
                self._host.run()
            except Exception as error:
                lost = isinstance(error, DeadWorkerError)  # whose message says all
                logger.error("the engine gives up: %s", describe(error), exc_info=not lost)
                self._report(Failed(describe(error), isinstance(error, DeadWorkerError) and error.killed))
                return 1
        return 0

    def _open(self) -> socket.socket | Door:
        """Listens for clients: at a Unix socket, or for those of other machines at a port that it chooses."""
        if not self._address.startswith("tcp://"):
            return listen(self._address)
        door = Door(self._address, self._config.data_parallel.key())
        self._address = door.address
        return door

    def _silence_logs(self, at_least: int) -> None:
        """Drops log lines below a level, unless debug logging is on."""
        wanted = logging.getLevelNamesMapping()[self._config.server.log_level.upper()]
        logging.getLogger("frame").setLevel(wanted if wanted <= logging.DEBUG else max(wanted, at_least))

    def _listen(self) -> None:
        """Takes the order of the parent; when it hangs up, ends the engine, and by force if the main thread hangs."""
        with contextlib.suppress(OSError, ValueError):
            while (order := self._parent.receive()) is not None:
                if not isinstance(order, Begin):
                    self._inbox.put((None, order))
                    continue
                show_as("frame-engine")
                self._silence_logs(at_least=logging.NOTSET)
                self._started = time.monotonic()
                self._orders.put(order)
        self._stop()
        time.sleep(_CLOSE_SECONDS)
        os._exit(1)

    def _stop(self) -> None:
        if self._host is None:
            os._exit(1)  # still starting, so no request is lost
        self._host.stop()

    def _report(self, message: EngineReport) -> None:
        try:
            self._parent.send(message)
        except OSError:
            self._stop()
