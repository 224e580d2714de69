"""Starts an engine process, follows its start-up, and starts it again when it dies.

Used by `frame serve` and by an `AsyncLLM` that owns its engine. Knows no HTTP and no requests; imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import signal
import socket
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec

from ..channel import AsyncChannel
from ..config.plain import to_plain
from ..config.tree import FrameConfig
from ..config.weight_source import with_weights
from ..engine.journal import JournalReader, journal_memory
from ..interfaces.client import EngineDeadError, EngineInfo
from ..registry import Registry
from .blame import Blame
from .messages import EngineDown, EngineNews, EngineReport, EngineUp, Failed, Ready, Stage, Weights

logger = logging.getLogger("frame.server")

#: A ready engine that lived this long was not one of "deaths in a row".
STEADY_SECONDS = 60.0
_STOP_SECONDS = 8.0

News = Callable[[EngineNews], Awaitable[None]]


def frame_command(subcommand: str) -> list[str]:
    """The command line that starts a subcommand of frame in a child process."""
    return [sys.executable, "-m", "frame", subcommand]


def write_config(config: FrameConfig) -> int:
    """The configuration for child processes, as the descriptor of a file in memory: nothing is left of it on a disk.

    Raises `ConfigError` for what cannot leave the process, such as classes.
    """
    return memory_file(json.dumps(to_plain(config)))


def memory_file(text: str) -> int:
    """A file that is gone with the last process that has it open; children read it as `/dev/fd/N`."""
    descriptor = os.memfd_create("frame")
    with open(descriptor, "w", encoding="utf-8", closefd=False) as file:
        file.write(text)
    return descriptor


async def spawn(command: Sequence[str], arguments: Sequence[str], kind: object, fds: Sequence[int] = ()) -> Child:
    """Starts a child in a session of its own, joined by a control channel that carries `kind` to us.

    The child finds its end as `--control-fd`; the end of the channel is the end of either side.
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
        """Ends the child and all that it started, at once."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)

    async def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """Hangs up, so that the child ends by itself, and ends it by force after `seconds`."""
        self.channel.close()
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self.process.wait(), seconds)
        self.kill()
        await self.process.wait()

    async def death(self) -> str:
        """Waits for the end and says what it was."""
        status = await self.process.wait()
        self.kill()  # whatever it left behind
        self.channel.close()
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"


class EngineSupervisor:
    """Keeps one engine process alive. `news` is awaited for every stage, start and death.

    `command` starts an engine process (tests bring their own).
    """

    def __init__(self, config: FrameConfig, news: News, command: Sequence[str] | None = None) -> None:
        self._config = config
        self._news = news
        self._command = command or frame_command("engine")
        self._files: tuple[int, ...] = ()  # configuration and choice of plugins
        self._child: Child | None = None
        self._task: asyncio.Task[None] | None = None
        self._deaths = 0
        self._blame = Blame()
        self._journal = -1
        self._hung = False
        self.pid: int | None = None

    async def start(self) -> EngineInfo:
        """Starts the engine and returns once it is ready; raises `EngineDeadError` with the cause otherwise."""
        try:
            config = write_config(self._for_engine())
            self._files = (config,)
            self._files = (config, memory_file(json.dumps(Registry.load().choices(self._config))))
            info = await self._launch()
        except BaseException:
            await self.stop()
            raise
        self._task = asyncio.create_task(self._watch())
        return info

    async def wait(self) -> None:
        """Returns when no engine will be started any more (the last `EngineDown` says why)."""
        if self._task is not None:
            await self._task

    async def stop(self, seconds: float = _STOP_SECONDS) -> None:
        """Ends the engine process, by force after `seconds`, and removes what it needed. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._child is not None:
            await self._child.stop(seconds)
            self._child = None
        for descriptor in (*self._files, self._journal):
            if descriptor >= 0:
                os.close(descriptor)
        self._files, self._journal = (), -1

    def _for_engine(self) -> FrameConfig:
        """The configuration without what only the parent and the API processes need."""
        server = self._config.server.model_copy(
            update={"api_key": [], "admin_key": [], "admin_port": None, "admin_uds": None}
        )
        return self._config.model_copy(update={"server": server})

    def _take_weights(self, source: Mapping[str, str | None]) -> None:
        """Has the next engine start with what this one serves now."""
        self._config = with_weights(self._config, **source)
        old, plugins = self._files
        self._files = (write_config(self._for_engine()), plugins)
        os.close(old)

    async def _launch(self) -> EngineInfo:
        """Starts a process and waits until it is ready; raises `EngineDeadError`."""
        if not self._files:
            raise EngineDeadError("the engine was stopped")
        config, plugins = self._files
        address = f"@frame-{secrets.token_hex(16)}"
        arguments = ["--config-file", f"/dev/fd/{config}", "--plugins-file", f"/dev/fd/{plugins}", "--socket", address]
        if self._journal >= 0:
            os.close(self._journal)
        self._journal = journal_memory()
        verdict = memory_file(msgspec.json.encode(self._blame.verdict).decode())
        arguments += ["--journal-fd", str(self._journal), "--verdict-file", f"/dev/fd/{verdict}"]
        try:
            descriptors = (*self._files, self._journal, verdict)
            self._child = await spawn(self._command, arguments, EngineReport, descriptors)
        finally:
            os.close(verdict)
        self.pid = self._child.process.pid
        limit = self._config.server.ready_seconds
        try:
            info = await asyncio.wait_for(self._follow(self._child), limit)
        except TimeoutError:
            await self._child.stop(0)
            raise EngineDeadError(
                f"the engine was not ready after {limit:g} seconds (ready_seconds); the last stage is shown above"
            ) from None
        await self._news(EngineUp(address, info))
        return info

    async def _follow(self, child: Child) -> EngineInfo:
        while True:
            match await child.channel.receive():
                case Stage() as stage:
                    await self._news(stage)
                case Ready(info=info):
                    return info
                case Failed(error=error):
                    await child.death()
                    raise EngineDeadError(error)
                case _:
                    raise EngineDeadError(f"the engine process {await child.death()} before it was ready")

    async def _watch(self) -> None:
        """Waits for deaths and answers each with a new start, until there are too many in a row."""
        ready_at = time.monotonic()
        while self._child is not None:
            cause = await self._mourn(self._child)
            if time.monotonic() - ready_at > STEADY_SECONDS:
                self._deaths = 0
            self._deaths += self._judge(cause, self._child.process.returncode == -signal.SIGKILL and not self._hung)
            while True:
                if self._deaths > self._config.server.max_engine_restarts:
                    await self._news(EngineDown(f"{cause} ({self._deaths} deaths in a row)", final=True))
                    return
                await self._news(EngineDown(cause))
                try:
                    await self._launch()
                    break
                except (EngineDeadError, OSError) as error:
                    cause = str(error)
                    self._deaths += 1
            ready_at = time.monotonic()

    async def _mourn(self, child: Child) -> str:
        """Waits for the end of a ready engine, or ends it when it hangs; says what the end was."""
        self._hung = False
        watchdog = asyncio.create_task(self._end_when_hung(child))
        try:
            failed = await self._last_words(child)
        finally:
            watchdog.cancel()
        death = f"the engine process {await child.death()}"
        if self._hung:
            seconds = self._config.server.hang_seconds
            death = f"the engine process hung: no step ended within {seconds:g} seconds (--hang-seconds)"
        return f"{death}: {failed}" if failed else death

    async def _end_when_hung(self, child: Child) -> None:
        journal, limit = JournalReader(self._journal), self._config.server.hang_seconds
        last, since = journal.beats, time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            beats = journal.beats
            if beats is None or beats != last:
                last, since = beats, time.monotonic()
            elif time.monotonic() - since > limit:
                self._hung = True
                child.kill()
                return

    def _judge(self, cause: str, killed: bool) -> int:
        """Learns from a death which requests to try alone; returns how much it counts as one "in a row".

        A death that narrows down who is at fault does not count; one of an engine that had worked begins a new row.
        """
        journal = JournalReader(self._journal)
        names = journal.in_flight()
        if journal.num_answered:
            self._deaths = 0
        guilty = self._blame.death(names, cause, cleared=journal.cleared, killed=killed)
        if guilty is not None:
            logger.error("%s: request %s is at fault and ends with an error", cause, guilty)
        return 0 if names and guilty is None else 1

    async def _last_words(self, child: Child) -> str | None:
        """Follows a ready engine to the end of its channel; returns what it says before."""
        failed = None
        try:
            while (message := await child.channel.receive()) is not None:
                if isinstance(message, Failed):
                    failed = message.error
                elif isinstance(message, Weights):
                    self._take_weights(message.source)
        except (OSError, ValueError):
            pass
        return failed
