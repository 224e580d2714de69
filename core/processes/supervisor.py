"""Starts an engine process, follows its start-up, and starts it again when it dies, without the request at fault.

Used by `frame serve` and by an `AsyncLLM` that owns its engine. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from frame.kept_weights.keeper import WeightKeeper
from frame.ranks.standstill import Standing

from ..config.tree import FrameConfig
from ..config.weight_source import with_weights
from ..engine.recovery.suspects import Suspects
from ..interfaces.client import EngineDeadError, EngineInfo
from .child import STOP_SECONDS
from .journal import PULSE_SECONDS, JournalReader
from .messages import Begin, EngineDown, EngineNews, EngineUp, Failed, Prepared, Ready, Rest, Stage, Wave, Weights
from .python_command import python_command
from .shared_fate import Death, OwnFate, Verdict
from .standby import EngineChild, Standby

logger = logging.getLogger("frame.server")

#: A ready engine that lived this many seconds does not count towards deaths in a row.
STEADY_SECONDS = 60.0
#: Seconds that an engine gets to end its steps.
REST_SECONDS = 10.0
#: A suspect is at fault after so many deaths, in the last of which it was computed alone. One kill from outside may
#: well hit the same request twice.
_PROOF = 2
_PROOF_IF_KILLED = 3
_MAX_GUILTY = 256

News = Callable[[EngineNews], Awaitable[None]]


class EngineSupervisor:
    """Keeps the engine process of data rank `rank` alive. `news` is awaited for every stage, start and death.

    `command` starts an engine process (tests bring their own).
    """

    def __init__(
        self,
        config: FrameConfig,
        news: News,
        command: Sequence[str] | None = None,
        rank: int = 0,
        fate: OwnFate | None = None,
    ) -> None:
        #: what the next engine is started with
        self.config = config.model_copy(update={"data_parallel": config.data_parallel.engine(rank)})
        self.rank = rank
        self._fate = fate or OwnFate()
        self._ready_at = 0.0
        self._news = news
        self._command = command or python_command("frame", "engine")
        self._standby: Standby | None = None
        self._keeper: WeightKeeper | None = None
        self._engine: EngineChild | None = None
        self._task: asyncio.Task[None] | None = None
        self._deaths = 0
        self._blame = Blame()
        self._hung = False
        self._rests = asyncio.Event()

    async def prepare(self, choices: Sequence[Any]) -> None:
        """Starts a process for the engine that takes no device yet; raises `ValueError` with what is wrong for it."""
        await self._make_standby(choices).prepare()

    async def start(self, choices: Sequence[Any]) -> EngineInfo:
        """Starts the engine with these plugins and returns once it is ready; raises `EngineDeadError`."""
        try:
            if self._standby is None:
                self._make_standby(choices)
            info = await self._launch()
        except BaseException:
            await self.stop(0)  # no request is lost
            raise
        self._task = asyncio.create_task(self._watch())
        return info

    async def wait(self) -> None:
        """Returns when no engine will be started any more (the last `EngineDown` says why)."""
        if (task := self._task) is not None:
            await asyncio.wait([task])
            if not task.cancelled():  # as `stop` does
                task.result()

    async def rest(self) -> None:
        """Has the engine hold its requests back; returns when it is in no step, is gone, or has had its time."""
        if self._engine is not None and self._engine.process.returncode is None:
            with contextlib.suppress(OSError, TimeoutError):
                async with asyncio.timeout(REST_SECONDS):
                    await self._engine.channel.send(Rest())
                    await self._rests.wait()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends the engine process, by force after `seconds`, and removes what it needed. May be called twice."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        if self._standby is not None:
            await self._standby.stop()
            self._standby = None
        if self._engine is not None:
            await self._engine.stop(seconds)
            self._engine = None
        if self._keeper is not None:
            self._keeper.close()
            self._keeper = None

    def _make_standby(self, choices: Sequence[Any]) -> Standby:
        if self.config.kept_weights.keep_weights and self._keeper is None:
            self._keeper = WeightKeeper()
        self._standby = Standby(self._command, self._for_engine(), choices, self._fate.rendezvous)
        return self._standby

    def _for_engine(self) -> FrameConfig:
        """The configuration without what only the parent and the API processes need."""
        keys: dict[str, Any] = {"api_key": [], "admin_key": [], "cache_salt_per_key": False}
        admin: dict[str, Any] = {"admin_port": None, "admin_uds": None, "rpc_methods": []}
        kept = self.config.kept_weights.model_copy(
            update={"weight_keeper": "" if self._keeper is None else self._keeper.address}
        )
        server = self.config.server.model_copy(update=keys | admin)
        return self.config.model_copy(update={"server": server, "kept_weights": kept})

    async def _launch(self) -> EngineInfo:
        """Tells a process to build its engine and waits until it is ready; raises `EngineDeadError`."""
        if self._standby is None:
            raise EngineDeadError("the engine was stopped")
        if self._engine is not None:
            self._engine.journal.close()
        engine = self._engine = await self._standby.take()
        if self._fate.falling:
            await engine.stop(0)
            raise EngineDeadError("an engine with which it shares experts died")
        limit = self.config.server.ready_seconds
        try:
            async with asyncio.timeout(limit):
                info = await self._begin(engine)
        except TimeoutError:
            await engine.stop(0)
            raise EngineDeadError(
                f"the engine was not ready after {limit:g} seconds (ready_seconds); the last stage is shown above"
            ) from None
        except ValueError as error:
            await engine.stop(0)
            raise EngineDeadError(f"a message of the starting engine cannot be read: {error}") from None
        await self._news(EngineUp(engine.address, info, self.rank))
        if self.config.server.standby_engine:
            self._standby.keep()
        return info

    async def _begin(self, engine: EngineChild) -> EngineInfo:
        with contextlib.suppress(OSError):  # it died; `death` says how
            await engine.channel.send(self._blame.begin)
        while True:
            message = None
            with contextlib.suppress(OSError):  # it died before it had read what was sent
                message = await engine.channel.receive()
            match message:
                case Stage(name=name, seconds=seconds):
                    await self._news(Stage(name, seconds, self.rank))
                case Prepared():
                    pass
                case Ready(info=info, address=address):
                    engine.address = address
                    return info
                case Failed(error=error):
                    await engine.death()
                    raise EngineDeadError(error)
                case _:
                    raise EngineDeadError(f"the engine process {await engine.death()} before it was ready")

    async def _watch(self) -> None:
        """Restarts the engine after each death, until there are too many in a row."""
        while self._engine is not None:
            self._ready_at = time.monotonic()
            death = await self._wait_for_death(self._engine)
            while True:
                verdict = await self._fate.settle(self, death)
                await self._news(EngineDown(verdict.cause, verdict.final, self.rank))
                if verdict.final:
                    return
                try:
                    await self._launch()
                    break
                except (EngineDeadError, OSError) as error:
                    death = Death(str(error))
                    if self._keeper is not None:
                        self._keeper.clear()  # perhaps the engine died of what was kept

    async def judge(self, death: Death) -> Verdict:
        """Counts a death, and learns from that of an engine that was ready which requests to compute alone."""
        if not death.began:
            self._deaths += 1
        elif self._engine is not None:
            if time.monotonic() - self._ready_at > STEADY_SECONDS:
                self._deaths = 0
            self._deaths += self._learn_from_death(self._engine.journal, death.cause, death.killed)
        if self._deaths <= self.config.server.max_engine_restarts:
            return Verdict(death.cause, final=False)
        return Verdict(f"{death.cause} ({self._deaths} deaths in a row)", final=True)

    @property
    def standing(self) -> Standing | None:
        """Where the engine was last, also after its death; None when there is none."""
        return None if self._engine is None else self._engine.journal.standing

    def kill(self) -> None:
        """Ends the engine process by force, if there is one."""
        if self._engine is not None:
            self._engine.kill()

    async def begin_wave(self, number: int) -> None:
        """Tells the engine that a wave of steps begins; raises `OSError` when it is gone."""
        if self._engine is not None:
            await self._engine.channel.send(Wave(number))

    async def _wait_for_death(self, engine: EngineChild) -> Death:
        """Waits until a ready engine ends, or kills it when it hangs; returns how it ended."""
        self._hung = False
        watchdog = asyncio.create_task(self._end_when_hung(engine))
        try:
            failed = await self._read_to_end(engine)
        finally:
            watchdog.cancel()
        death = f"the engine process {await engine.death()}"
        if self._hung:
            seconds = self.config.server.hang_seconds
            death = f"the engine process hung: no step ended within {seconds:g} seconds (--hang-seconds)"
        killed = engine.process.returncode == -signal.SIGKILL and not self._hung
        if failed is None:
            return Death(death, killed, told=False, began=True, hung=self._hung)
        return Death(f"{death}: {failed.error}", killed or failed.killed, began=True)

    async def _end_when_hung(self, engine: EngineChild) -> None:
        limit = max(self.config.server.hang_seconds, 4 * PULSE_SECONDS)
        last, since = engine.journal.beats, time.monotonic()
        while True:
            await asyncio.sleep(min(1.0, limit / 4))
            beats = engine.journal.beats
            if beats is None or beats != last:
                last, since = beats, time.monotonic()
            elif time.monotonic() - since > limit + (0.0 if engine.is_stopped else self._fate.patience_seconds):
                self._hung = True
                engine.kill()
                return

    def _learn_from_death(self, journal: JournalReader, cause: str, killed: bool) -> int:
        """Learns from a death which requests to compute alone.

        Returns by how much it raises the count of deaths in a row. A death that narrows down the request at fault does
        not count; the death of an engine that had worked starts the count again.
        """
        names = journal.in_flight()
        if journal.num_answered:
            self._deaths = 0
        guilty = self._blame.death(names, cause, cleared=journal.cleared, killed=killed)
        if guilty is not None:
            logger.error("%s: request %s is at fault and ends with an error", cause, guilty)
        return 0 if names and guilty is None else 1

    async def _read_to_end(self, engine: EngineChild) -> Failed | None:
        """Reads a ready engine's messages until its channel ends; returns its `Failed` if it sent one."""
        failed = None
        with contextlib.suppress(OSError, ValueError):
            while (message := await engine.channel.receive()) is not None:
                if isinstance(message, Failed):
                    failed = message
                elif isinstance(message, Rest):
                    self._rests.set()
                elif isinstance(message, Wave):
                    await self._fate.begin_wave(message.number)
                elif isinstance(message, Weights) and self._standby is not None:
                    self.config = with_weights(self.config, **message.source)  # the next engine loads them, too
                    await self._standby.renew(self._for_engine())
        return failed


class Blame:
    """Which requests are suspected of killing the engines of one supervisor."""

    def __init__(self) -> None:
        self._suspects = Suspects()
        self._deaths: Counter[str] = Counter()  # suspect -> deaths since a request was last cleared
        self._guilty: dict[str, str] = {}

    @property
    def begin(self) -> Begin:
        """The message with which the next engine begins."""
        return Begin(self._suspects.groups, self._guilty)

    def death(self, names: Sequence[str], cause: str, *, cleared: bool, killed: bool) -> str | None:
        """Records that an engine died with `names` in flight.

        Returns the request that caused it, if that is now certain. `cleared`: the engine had computed all suspects
        without dying. `killed`: by SIGKILL, which a request need not have caused.
        """
        if cleared:
            self._suspects = Suspects()
            self._deaths.clear()
        self._deaths.update(names)
        name = self._suspects.blame(names)
        if name is None:
            return None
        if self._deaths[name] < (_PROOF_IF_KILLED if killed else _PROOF):
            self._suspects.try_again(name)
            return None
        while len(self._guilty) >= _MAX_GUILTY:
            del self._guilty[next(iter(self._guilty))]
        self._guilty[name] = f"{cause} each time the request was computed, also when it was alone"
        return name
