"""Starts engine processes, and keeps a standby engine for a quick restart.

The standby has imported its libraries, holds no device, and waits until the engine dies: imports take most of an
engine's start.
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

#: Seconds from a ready engine to the start of its standby, so that the first requests do not share the CPUs with it.
DELAY_SECONDS = 2.0
#: Seconds until a standby that ended by itself is replaced.
_AGAIN_SECONDS = 60.0


class EngineChild:
    """An engine process, which may be a standby. Owns the memory of its journal."""

    def __init__(self, child: Child, address: str, journal: int) -> None:
        self.child = child
        self.address = address
        self.journal = journal

    @property
    def alive(self) -> bool:
        """Whether it runs, as far as the control channel shows."""
        return self.child.process.returncode is None

    async def stop(self, seconds: float) -> None:
        """Ends the process, by force after `seconds`."""
        await self.child.stop(seconds)
        self.forget()

    def forget(self) -> None:
        """Frees the journal; may be called twice."""
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
        """The standby process, else a new one. There is no standby afterwards until `keep` is called."""
        await self._cancel_standby_start()
        taken, self._ahead = self._ahead, None
        if taken is not None and taken.alive:
            return taken
        if taken is not None:
            await taken.stop(0)
        return await self._spawn()

    def keep(self) -> None:
        """Starts a standby soon and replaces it when it ends, until `take` or `stop`."""
        self._keeper = asyncio.create_task(self._keep())

    async def renew(self, files: tuple[int, int]) -> None:
        """Starts further processes with other files; ends the standby, which has read the old ones."""
        kept = self._keeper is not None
        await self.stop()
        self._files = files
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
                death = await self._ahead.child.death()
                logger.warning("the standby engine %s; another is started in a minute", death)
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
