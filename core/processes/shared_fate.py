"""What becomes of the other engines when one dies: nothing, or all end and start again together.

Engines that share experts wait for each other in the middle of every step, so that none goes on without the others.
Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import NamedTuple, Protocol

from ..parallel.rendezvous import Rendezvous


class Death(NamedTuple):
    """How an engine ended, in a sentence. `killed`: by a SIGKILL from outside.

    `told`: it said why itself, as engines do that wait in vain for another one. `began`: it had been ready.
    """

    cause: str
    killed: bool = False
    told: bool = True
    began: bool = False


class Verdict(NamedTuple):
    """Why the engine is gone, and whether no other one is started."""

    cause: str
    final: bool


class Member(Protocol):
    """The supervisor of an engine."""

    rank: int

    def judge(self, death: Death) -> Verdict:
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

    async def settle(self, member: Member, death: Death) -> Verdict:
        """Called when an engine has died; returns when it may be started again."""
        return member.judge(death)

    async def begin_wave(self, number: int) -> None:
        """An engine asks that all begin this wave of steps."""

    def close(self) -> None:
        """Frees what engines needed together. May be called twice."""


class SharedFate(OwnFate):
    """Engines that share experts. `add` all of them before the first is started."""

    patience_seconds = 3.0

    def __init__(self) -> None:
        self._place = Rendezvous()
        self.rendezvous = self._place.address
        self._members: list[Member] = []
        self._dead: dict[int, Death] = {}
        self._settled: asyncio.Future[tuple[int, Verdict]] | None = None

    def add(self, member: Member) -> None:
        """Another engine that shares the experts."""
        self._members.append(member)

    @property
    def falling(self) -> bool:  # type: ignore[override]
        return bool(self._dead)

    async def settle(self, member: Member, death: Death) -> Verdict:
        """Ends all other engines, and returns when they are gone; only the first to die counts as dead."""
        if self._settled is None:
            self._settled = asyncio.get_running_loop().create_future()
        settled = self._settled
        first = not self._dead
        self._dead[member.rank] = death
        if first:
            for other in self._members:
                if other is not member:
                    other.kill()
        if len(self._dead) == len(self._members):
            self._settle(settled)
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

    def _settle(self, settled: asyncio.Future[tuple[int, Verdict]]) -> None:
        rank = min(self._dead, key=lambda one: _innocence(self._dead[one]))  # the first of equals
        member = next(one for one in self._members if one.rank == rank)
        death, self._dead, self._settled = self._dead[rank], {}, None
        self._place.clear()
        settled.set_result((rank, member.judge(death)))


def _innocence(death: Death) -> int:
    """Lower for an engine that more likely died first: the others say that they waited for it."""
    return 2 if death.told and not death.killed else int(death.told)
