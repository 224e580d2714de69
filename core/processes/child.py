"""Starts child processes joined by a control channel, and ends them. Imports no torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
from collections.abc import Sequence

from ..config.tree import FrameConfig
from ..startup.openmp import child_environment
from .channel import AsyncChannel

STOP_SECONDS = 8.0


def write_config(config: FrameConfig) -> int:
    """Writes the configuration for child processes to a file in memory and returns its descriptor.

    Nothing is left on disk. Raises `ConfigError` for values that cannot leave the process, such as classes.
    """
    return memory_file(json.dumps(config.to_plain()))


def memory_file(text: str) -> int:
    """A file in memory, freed when the last process closes it; children read it as `/dev/fd/N`."""
    descriptor = os.memfd_create("frame")
    with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
        file.write(text)
    return descriptor


async def spawn(command: Sequence[str], arguments: Sequence[str], kind: object, fds: Sequence[int] = ()) -> Child:
    """Starts a child in a session of its own, with a control channel on which the parent receives `kind`.

    The child gets its end as `--control-fd`; each side ends when the channel closes.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        channel = await AsyncChannel.wrap(ours, kind)
        try:
            process = await asyncio.create_subprocess_exec(
                *command,
                *arguments,
                "--control-fd",
                str(theirs.fileno()),
                pass_fds=(theirs.fileno(), *fds),
                stdin=asyncio.subprocess.DEVNULL,
                start_new_session=True,
                env=child_environment(),
            )
        except BaseException:
            channel.close()
            raise
    return Child(process, channel)


class Child:
    """A child process and the channel to it."""

    def __init__(self, process: asyncio.subprocess.Process, channel: AsyncChannel) -> None:
        self.process = process
        self.channel = channel

    def signal(self, number: int) -> None:
        """Sends a signal to the child alone; nothing when it is gone."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def kill(self) -> None:
        """Kills the child and all processes that it started."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Closes the channel, which tells the child to end, and kills it after `seconds`."""
        self.channel.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.process.wait(), seconds)
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
