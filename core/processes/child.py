"""Starts child processes joined by a control channel, and ends them. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path

from ..startup.openmp import child_environment
from .channel import AsyncChannel

STOP_SECONDS = 8.0


class Child:
    """A child process and the channel to it."""

    def __init__(self, process: asyncio.subprocess.Process, channel: AsyncChannel) -> None:
        self.process = process
        self.channel = channel

    def signal(self, number: int) -> None:
        """Sends a signal to the child alone; nothing when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    @property
    def is_stopped(self) -> bool:
        """Whether a signal has stopped the process; known on Linux only."""
        with contextlib.suppress(OSError):
            return Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(") ")[2].startswith("T")
        return False

    def kill(self) -> None:
        """Kills the child and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Closes the channel, which tells the child to end, and kills it after `seconds`."""
        self.channel.close()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.process.wait()
        self.kill()
        await self.process.wait()

    async def death(self) -> str:
        """Waits until the child has ended and returns how, as text."""
        status = await self.process.wait()
        self.kill()  # kill the processes that it left behind
        self.channel.close()
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"


async def spawn(
    command: Sequence[str], arguments: Sequence[str], kind: object, fds: Sequence[int], files: Mapping[str, str]
) -> Child:
    """Starts a child in a session of its own, with a control channel on which the parent receives `kind`.

    The child inherits `fds`, and its end of the channel as `--control-fd`; each side ends when the channel closes. Each
    option of `files` names a file in memory with the given text, which ends with the child.
    """
    ours, theirs = socket.socketpair()
    with theirs, contextlib.ExitStack() as written:
        channel = await AsyncChannel.wrap(ours, kind)
        try:
            inherited = [theirs.fileno(), *fds]
            options = [*arguments, "--control-fd", str(theirs.fileno())]
            for option, text in files.items():
                file = written.enter_context(open(os.memfd_create("frame"), "w", encoding="utf-8"))
                file.write(text)
                file.flush()
                inherited.append(file.fileno())
                options += [option, f"/dev/fd/{file.fileno()}"]
            process = await asyncio.create_subprocess_exec(
                *command,
                *options,
                pass_fds=inherited,
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=child_environment(),
            )
        except BaseException:
            channel.close()
            raise
    return Child(process, channel)
