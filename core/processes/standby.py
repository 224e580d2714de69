"""Engine processes, one of them ahead: it has loaded its libraries, holds no device, and waits until it is wanted.

Most of an engine's start is the import of libraries, which a restart need not wait for. Knows no death and no verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
from collections.abc import Sequence

from .child import Child, spawn
from .journal import journal_memory
from .messages import EngineReport

logger = logging.getLogger("frame.server")

#: After an engine is ready, so that its first requests have the processors for themselves.
DELAY_SECONDS = 2.0
#: Until another one is started in the place of one that ended by itself.
_AGAIN_SECONDS = 60.0


class EngineChild:
    """An engine process that may have been told to begin, or not yet. Owns the memory of its journal."""

    def __init__(self, child: Child, address: str, journal: int) -> None:
        self.child = child
        self.address = address
        self.journal = journal

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as is known."""
        return self.child.process.returncode is None

    async def stop(self, seconds: float) -> None:
        """Ends the process, by force after `seconds`."""
        await self.child.stop(seconds)
        self.forget()

    def forget(self) -> None:
        """Gives the journal up; may be called twice."""
        if self.journal >= 0:
            os.close(self.journal)
            self.journal = -1


class Standby:
    """Makes engine processes by `command`; they read the descriptors `files` (configuration, choice of plugins)."""

    def __init__(self, command: Sequence[str], files: tuple[int, int]) -> None:
        self._command = command
        self._files = files
        self._ahead: EngineChild | None = None
        self._keeper: asyncio.Task[None] | None = None

    async def take(self) -> EngineChild:
        """The process that is ahead, else a new one. Nobody is ahead then, until `keep`."""
        await self._rest()
        taken, self._ahead = self._ahead, None
        if taken is not None and taken.alive:
            return taken
        if taken is not None:
            await taken.stop(0)
        return await self._spawn()

    def keep(self) -> None:
        """Has a process ahead from soon on, until `take` or `stop`."""
        self._keeper = asyncio.create_task(self._keep())

    async def renew(self, files: tuple[int, int]) -> None:
        """Has processes read other files from now on; the one that is ahead has read the old ones, and ends."""
        kept = self._keeper is not None
        await self.stop()
        self._files = files
        if kept:
            self.keep()

    async def stop(self) -> None:
        """Ends the process that is ahead. It has nothing to lose."""
        await self._rest()
        if self._ahead is not None:
            await self._ahead.stop(0)
            self._ahead = None

    async def _rest(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.gather(self._keeper, return_exceptions=True)
            self._keeper = None

    async def _keep(self) -> None:
        await asyncio.sleep(DELAY_SECONDS)
        while True:
            with contextlib.suppress(OSError):  # no memory or no process to be had: the next time, perhaps
                self._ahead = await self._spawn()
                death = await self._ahead.child.death()
                logger.warning("the engine process that stands by %s; another follows in a minute", death)
                self._ahead.forget()
                self._ahead = None
            await asyncio.sleep(_AGAIN_SECONDS)

    async def _spawn(self) -> EngineChild:
        config, plugins = self._files
        address, journal = f"@frame-{secrets.token_hex(16)}", journal_memory()
        arguments = ["--config-file", f"/dev/fd/{config}", "--plugins-file", f"/dev/fd/{plugins}"]
        arguments += ["--socket", address, "--journal-fd", str(journal)]
        try:
            child = await spawn(self._command, arguments, EngineReport, (config, plugins, journal))
        except BaseException:
            os.close(journal)
            raise
        return EngineChild(child, address, journal)
