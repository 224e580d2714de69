"""Starts engine processes, and keeps a standby engine for a quick restart.

The standby has imported its libraries, holds no device, and waits until the engine dies: imports take most of an
engine's start. It warns of nothing, since the engine before it had the same configuration.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import secrets
from collections.abc import Sequence
from typing import Any

from ..config.tree import FrameConfig
from ..interfaces.client import EngineDeadError
from .child import STOP_SECONDS, Child, spawn
from .journal import JournalReader
from .messages import EngineReport, Failed, Prepared, Stage

logger = logging.getLogger("frame.server")

#: Seconds from a ready engine to the start of its standby, so that the first requests do not share the CPUs with it.
DELAY_SECONDS = 2.0
#: Seconds until a standby that ended by itself is replaced.
_AGAIN_SECONDS = 60.0


class EngineChild(Child):
    """An engine process, perhaps the standby; the address of its socket, and its journal, which outlives it."""

    def __init__(self, child: Child, address: str, journal: JournalReader) -> None:
        super().__init__(child.process, child.channel)
        self.address = address
        self.journal = journal

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends the process, by force after `seconds`, and frees its journal."""
        await super().stop(seconds)
        self.journal.close()

    async def cause(self) -> str:
        """Waits until a process that was not told to begin has ended; returns how, and the error that it sent."""
        await self.process.wait()
        self.kill()  # processes that it left behind may hold the other end of the channel
        errors = []
        with contextlib.suppress(OSError, ValueError):
            while (message := await self.channel.receive()) is not None:
                errors += [message.error] if isinstance(message, Failed) else []
        return ": ".join([await self.death(), *errors])


class Standby:
    """Makes engine processes by `command` for a configuration and the parent's choice of plugins.

    `rendezvous` is where the workers of engines that share experts meet. Raises `ConfigError` for values that cannot
    leave the process, such as classes.
    """

    def __init__(
        self, command: Sequence[str], config: FrameConfig, choices: Sequence[Any], rendezvous: str = ""
    ) -> None:
        self._command = command
        own = config.data_parallel.data_parallel_own_address  # of an engine that clients of other machines use
        self._place = f"tcp://[{own}]/" if ":" in own else f"tcp://{own}/" if own else "@frame-"
        self._arguments = ["--rendezvous", rendezvous] if rendezvous else []
        self._files = {"--config-file": json.dumps(config.to_plain()), "--plugins-file": json.dumps(choices)}
        self._ahead: EngineChild | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def take(self) -> EngineChild:
        """The standby process, else a new one. There is no standby afterwards until `keep` is called."""
        await self._cancel_standby_start()
        taken, self._ahead = self._ahead, None
        if taken is not None and taken.process.returncode is None:
            return taken
        if taken is not None:
            await taken.stop(0)
        return await self._spawn()

    async def prepare(self) -> None:
        """Starts a standby now, and returns when it could begin.

        Raises `ValueError` with what is impossible of it, `EngineDeadError` when it cannot begin for another cause.
        """
        self._ahead = await self._spawn()
        while isinstance(message := await self._ahead.channel.receive(), Stage):
            pass
        if isinstance(message, Failed):
            raise ValueError(message.error) if message.refused else EngineDeadError(message.error)
        if not isinstance(message, Prepared):
            raise EngineDeadError(f"the engine process {await self._ahead.death()} before it could begin")

    def keep(self) -> None:
        """Starts a standby soon and replaces it when it ends, until `take` or `stop`."""
        self._keeper = asyncio.create_task(self._keep())

    async def renew(self, config: FrameConfig) -> None:
        """Gives further processes another configuration; ends the standby, which has read the present one."""
        kept = self._keeper is not None
        await self.stop()
        self._files["--config-file"] = json.dumps(config.to_plain())
        if kept:
            self.keep()

    async def stop(self) -> None:
        """Kills the standby, which serves no request."""
        await self._cancel_standby_start()
        if self._ahead is not None:
            await self._ahead.stop(0)
            self._ahead = None

    async def _cancel_standby_start(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def _keep(self) -> None:
        await asyncio.sleep(DELAY_SECONDS)
        while True:
            with contextlib.suppress(OSError):  # out of memory or processes: tried again later
                self._ahead = await self._spawn()
                cause = await self._ahead.cause()
                logger.warning("the standby engine %s; another is started in a minute", cause)
                self._ahead.journal.close()
                self._ahead = None
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _spawn(self) -> EngineChild:
        address, journal = f"{self._place}{secrets.token_hex(16)}", JournalReader()
        arguments = ["--socket", address, "--journal-fd", str(journal.descriptor), *self._arguments]
        try:
            child = await spawn(self._command, arguments, EngineReport, [journal.descriptor], self._files)
        except BaseException:
            journal.close()
            raise
        return EngineChild(child, address, journal)
