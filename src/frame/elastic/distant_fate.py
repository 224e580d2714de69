"""Engines that share experts and are started by several machines: they end, start again and step together.

The server decides, by a `SharedFate` of which engines elsewhere are members, too. Each machine tells it how its own
engines end, and does what it is told. A machine that is gone ends the others' engines for good, and so the server; when
the server is gone, so do the machines. Imports no torch.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.setups import mesh_of
from frame.core.processes.shared_fate import Death, Member, OwnFate, SharedFate, Verdict
from frame.links.fate_messages import Died, FateNews, FateOrder, Judge, Judged, Kill, Settled, SharedWave
from frame.links.members import NoMembers
from frame.ranks.standstill import Standing


def fate_of(config: FrameConfig) -> OwnFate:
    """What joins the ends of the engines that this machine starts."""
    parallel = config.data_parallel
    if mesh_of(config).data == 1:
        return OwnFate()
    if not parallel.over_machines:
        return SharedFate() if len(parallel.local_ranks) > 1 else OwnFate()
    host, own = parallel.data_parallel_address, parallel.data_parallel_own_address or parallel.data_parallel_address
    place = f"tcp://{f'[{host}]' if ':' in host else host}:{parallel.data_parallel_rpc_port + 1}#{own}"
    return DistantFate(place) if parallel.headless else SharedFate(place)


class DistantFate(OwnFate):
    """Of the engines of a machine whose server is elsewhere. `send` tells the server something; set it at once."""

    patience_seconds = 3.0

    def __init__(self, rendezvous: str) -> None:
        self.rendezvous = rendezvous
        self.send: Callable[[FateNews], Awaitable[None]]
        self._members: dict[int, Member] = {}
        self._falling: set[int] = set()  # that have ended or must, and of which the server does not know that all have
        self._verdicts: dict[int, asyncio.Future[Verdict]] = {}

    def add(self, member: Member) -> None:
        self._members[member.rank] = member

    @property
    def falling(self) -> bool:  # type: ignore[override]
        return bool(self._falling)

    async def settle(self, member: Member, death: Death) -> Verdict:
        """Returns when the engines of all machines have ended."""
        verdict: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        self._verdicts[member.rank] = verdict
        self._falling.add(member.rank)
        await self.send(Died(member.rank, death, member.standing))
        return await verdict

    async def begin_wave(self, number: int) -> None:
        await self.send(SharedWave(next(iter(self._members)), number))

    async def obey(self, order: FateOrder) -> None:
        """Does what the server says of one of the engines here; nothing for one that is not."""
        if (member := self._members.get(order.rank)) is None:
            return
        match order:
            case Kill(rank=rank):
                self._falling.add(rank)
                member.kill()
            case Judge(rank=rank, death=death):
                await self.send(Judged(rank, await member.judge(death)))
            case Settled(rank=rank, verdict=verdict):
                self._falling.clear()  # it says so of the others next: this one must not wait for that
                if (waiting := self._verdicts.pop(rank, None)) is not None and not waiting.done():
                    waiting.set_result(verdict)
            case SharedWave(number=number):
                with contextlib.suppress(OSError):  # it is dead, and the others soon will be
                    await member.begin_wave(number)


class DistantMember:
    """Stands in for the supervisor of an engine of another machine, which `send` reaches."""

    def __init__(self, rank: int, send: Callable[[int, FateOrder], Coroutine[Any, Any, None]]) -> None:
        self.rank, self._send = rank, send
        self.standing: Standing | None = None
        self.verdict: asyncio.Future[Verdict] | None = None
        self.gone = ""  # how its machine went
        self._settling = False
        self._tasks: set[asyncio.Task[Any]] = set()

    async def judge(self, death: Death) -> Verdict:
        """What its machine says; final where that is gone."""
        if not self.gone:
            self.verdict = asyncio.get_running_loop().create_future()
            await self._send(self.rank, Judge(self.rank, death))
            if not self.gone:
                return await self.verdict
        return Verdict(self.gone, final=True)

    def kill(self) -> None:
        """Has its machine end it."""
        self._begin(self._send(self.rank, Kill(self.rank)))

    async def begin_wave(self, number: int) -> None:
        """Has its machine tell it."""
        await self._send(self.rank, SharedWave(self.rank, number))

    def died(self, fate: SharedFate, death: Death) -> None:
        """Its machine says so, or is gone; when all have ended its machine hears of it."""
        if not self._settling:
            self._settling = True
            self._begin(self._settle(fate, death))

    def lost(self, fate: SharedFate, cause: str) -> None:
        """Its machine is gone."""
        self.gone, self.standing = cause, None
        if self.verdict is not None and not self.verdict.done():
            self.verdict.set_result(Verdict(cause, final=True))
        self.died(fate, Death(cause, told=False))

    async def _settle(self, fate: SharedFate, death: Death) -> None:
        gone = None
        while gone != self.gone:  # the machine may go while its engine's end is judged
            gone = self.gone
            verdict = await fate.settle(self, Death(gone, told=False) if gone else death)
        self._settling = False
        await self._send(self.rank, Settled(self.rank, verdict))

    def _begin(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


class DistantMembers(NoMembers):
    """The engines `ranks` of other machines, as members of `fate`."""

    joined = True

    def __init__(
        self, fate: SharedFate, ranks: Sequence[int], send: Callable[[int, FateOrder], Coroutine[Any, Any, None]]
    ) -> None:
        self._fate = fate
        self._members = {rank: DistantMember(rank, send) for rank in ranks}
        for one in self._members.values():
            fate.add(one)

    async def news(self, message: FateNews) -> None:
        member = self._members[message.rank]
        match message:
            case Died(death=death, standing=standing):
                member.standing = standing
                member.died(self._fate, death)
            case Judged(verdict=verdict):
                if member.verdict is not None and not member.verdict.done():
                    member.verdict.set_result(verdict)
            case SharedWave(number=number):
                await self._fate.begin_wave(number)

    def lost(self, ranks: Sequence[int], cause: str) -> None:
        for rank in ranks:
            self._members[rank].lost(self._fate, cause)
