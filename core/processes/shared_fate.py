"""What becomes of the other engines when one dies: nothing, or all end and start again together.

Engines that share experts wait for each other in the middle of every step, so that none goes on without the others.
Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple, Protocol

from frame.ranks.standstill import Standing, engine_behind

from ..parallel.rendezvous import Rendezvous

#: Seconds that the other engines get to end by themselves where one says why it ended.
LAST_SECONDS = 1.0


class Death(NamedTuple):
    """How an engine ended, in a sentence. `killed`: by a SIGKILL from outside.

    `told`: it said why itself, as engines do that wait in vain for another one. `began`: it had been ready. `hung`: it
    was ended because no step of it did.
    """

    cause: str
    killed: bool = False
    told: bool = True
    began: bool = False
    hung: bool = False

    @property
    def is_of_waiting(self) -> bool:
        """Whether it may have waited for another engine, which is at fault then."""
        return self.hung or (self.told and not self.killed)


class Verdict(NamedTuple):
    """Why the engine is gone, and whether no other one is started."""

    cause: str
    final: bool


class Member(Protocol):
    """The supervisor of an engine."""

    rank: int

    @property
    def standing(self) -> Standing | None:
        """Where the engine was last, also after its death."""

    async def judge(self, death: Death) -> Verdict:
        """Counts a death, and learns from it which requests may be at fault."""

    def kill(self) -> None:
        """Ends the engine process by force, if there is one."""

    async def begin_wave(self, number: int) -> None:
        """Tells the engine that a wave of steps begins."""


class OwnFate:
    """Engines that share nothing: each starts again alone."""

    #: where the workers of all engines find one another; "" where each engine has a place of its own
    rendezvous = ""
    #: whether an engine has died and others, which must end with it, have not
    falling = False
    #: how much longer an engine may hang while its process runs: it may wait for one whose process was stopped
    patience_seconds = 0.0

    def add(self, member: Member) -> None:
        """An engine of these; all are added before the first is started."""

    async def settle(self, member: Member, death: Death) -> Verdict:
        """Called when an engine has died; returns when it may be started again."""
        return await member.judge(death)

    async def begin_wave(self, number: int) -> None:
        """An engine asks that all begin this wave of steps."""

    def close(self) -> None:
        """Frees what engines needed together. May be called twice."""


class SharedFate(OwnFate):
    """Engines that share experts, whose workers meet at `rendezvous`; by default in memory of this process.

    One that says why it ends may only have noticed that another is gone, or hang for one that waits for it. So the
    others get `LAST_SECONDS` to end by themselves, before they are killed.
    """

    patience_seconds = 3.0

    def __init__(self, rendezvous: str = "") -> None:
        self._place = Rendezvous(not rendezvous)
        self.rendezvous = rendezvous or self._place.address
        self._members: list[Member] = []
        self._dead: dict[int, Death] = {}
        self._killed: set[int] = set()  # by this object
        self._settled: asyncio.Future[tuple[int, Verdict]] | None = None

    def add(self, member: Member) -> None:
        self._members.append(member)

    @property
    def falling(self) -> bool:  # type: ignore[override]
        return bool(self._dead)

    async def settle(self, member: Member, death: Death) -> Verdict:
        """Ends all other engines, and returns when they are gone; only the one at fault counts as dead."""
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        settled = self._settled
        first = not self._dead
        self._dead[member.rank] = death
        if len(self._dead) == len(self._members):
            await self._settle(settled)
        if first and death.told and not death.killed:
            await asyncio.wait([settled], timeout=LAST_SECONDS)
        if first and not settled.done():
            for other in self._members:
                if other.rank not in self._dead:
                    self._killed.add(other.rank)
                    other.kill()
        rank, verdict = await asyncio.shield(settled)
        if rank == member.rank:
            return verdict
        return Verdict(f"engine {rank}, with which it shares experts, is gone: {verdict.cause}", verdict.final)

    async def begin_wave(self, number: int) -> None:
        for member in self._members:
            with contextlib.suppress(OSError):  # it is dead, and the others soon will be
                await member.begin_wave(number)

    def close(self) -> None:
        self._place.close()

    async def _settle(self, settled: asyncio.Future[tuple[int, Verdict]]) -> None:
        rank, death = self._at_fault()
        verdict = await next(one for one in self._members if one.rank == rank).judge(death)
        self._dead, self._killed, self._settled = {}, set(), None
        self._place.clear()
        settled.set_result((rank, verdict))

    def _at_fault(self) -> tuple[int, Death]:
        """The engine for which others waited, else the first that nobody here killed, and that does not say it waited.

        Where all hang it is known by how far each has come.
        """
        dead, killed = self._dead, self._killed
        rank = min(dead, key=lambda one: (one in killed, dead[one].told and not dead[one].killed))
        behind = engine_behind({one.rank: one.standing for one in self._members})
        if behind is None or not all(dead[one].is_of_waiting for one in dead.keys() - killed):
            return rank, dead[rank]
        rank, why = behind
        said = "the engine process hung" if rank in killed else dead[rank].cause
        return rank, Death(f"{said}: {why}", began=dead[rank].began)
