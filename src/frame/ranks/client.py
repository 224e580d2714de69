"""Several engines of one model as one: their client, which divides requests among them, and their supervisor.

Each engine is a data rank with devices and a KV cache of its own. Unless they share experts none waits for another, and
when one dies only its requests wait until it is there again. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from frame.core.config.data_parallel import MOST_LOCAL
from frame.core.config.errors import ConfigError
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.client import EngineDeadError, EngineInfo
from frame.core.interfaces.engine import EngineOutput, EngineRequest, EngineStats
from frame.core.processes.client import RemoteEngine
from frame.core.processes.messages import ClientNews, EngineDown, Engines, Scaling
from frame.core.processes.output_queue import OutputQueue
from frame.elastic.sizes import is_elastic
from frame.elastic.supervisor import DataParallelSupervisor

from .choice import RankChoice
from .homes import Homes
from .joined import joined_answers, joined_history, joined_stats

#: Control methods that only ask, or tell what no engine needs to hear: they are answered while an engine is down, too.
_QUESTIONS = frozenset(("is_paused", "is_sleeping", "history", "list_adapters", "end_session"))
#: Control methods whose effect would end with the present engines, or would not reach those that are being prepared.
_CHANGES = frozenset(("pause", "sleep", "update_weights", "worker", "start_profile"))


class _Running(msgspec.Struct):
    """A request that an engine has: the engine and its place, what the request costs it, and the tokens that came."""

    engine: RemoteEngine
    place: int
    cost: float
    num_tokens: int = 0


class DataParallelClient:
    """Implements `EngineClient` over the engines of data ranks `ranks`; `choice` divides requests among them.

    A request that was lost with its engine goes to that rank again, since its next engine knows which of them may have
    been at fault; it goes to another one when no engine will be started there any more.
    """

    def __init__(self, ranks: range, choice: RankChoice, key: bytes = b"") -> None:
        self.on_close: Callable[[], Awaitable[None]] | None = None
        #: has other engines started in place of these, so many; see `ElasticEngines.scale`
        self.on_scale: Callable[[int], Awaitable[bool]] = _fixed
        self._ranks, self._choice, self._key = ranks, choice, key
        self._queue = OutputQueue()
        self._engines = [RemoteEngine(self._queue, key) for _ in ranks]
        self._running: dict[str, _Running] = {}
        self._homes = Homes[RemoteEngine]()  # of requests whose engine died, and of sessions
        self._stats = [EngineStats() for _ in ranks]  # the last known ones
        self._scaling: asyncio.Task[bool] | None = None
        self._scaling_told = False  # whether the parent says so, whichever process asked
        self._info: EngineInfo | None = None  # of engines in whose place others start

    @property
    def ready(self) -> bool:
        """Whether every engine was ready once."""
        return all(engine.ready for engine in self._engines)

    @property
    def info(self) -> EngineInfo:
        """Facts of the engines, whose caches may differ: what all of them can do."""
        infos = [engine.info for engine in self._engines if engine.ready] or [self._info or self._engines[0].info]
        shortest = min(infos, key=lambda info: info.max_model_len)
        return msgspec.structs.replace(shortest, num_blocks=sum(info.num_blocks for info in infos))

    @property
    def error(self) -> str | None:
        """None while an engine serves, else why none does."""
        errors = [engine.error for engine in self._engines]
        return None if None in errors else "; ".join(self._named(place, error) for place, error in enumerate(errors))

    @property
    def end(self) -> str | None:
        """Why no engine will be started any more; None while one serves or is starting."""
        ends = [engine.end for engine in self._engines]
        return None if None in ends else "; ".join(self._named(place, end) for place, end in enumerate(ends))

    async def news(self, message: ClientNews) -> None:
        """Handles a message of the supervisor of one engine, or of all."""
        if isinstance(message, Engines):
            await self._replace(message)
        elif isinstance(message, Scaling):
            self._scaling_told = message.under_way
        else:
            await self._engines[message.rank - self._ranks.start].news(message)

    async def add(self, request: EngineRequest) -> None:
        """Sends a request to the engine that has the least to do with it; raises as `RemoteEngine.add` does."""
        name = request.request_id
        while True:
            place = self._place(request)
            engine = self._engines[place]
            entry = self._running[name] = _Running(engine, place, self._choice.cost(request))
            self._choice.begin(place, entry.cost)
            if request.follows is not None:
                self._homes.note(name, engine)
            try:
                await engine.add(request)
                return
            except EngineDeadError:  # it went while the request waited for it; another one may be there
                self._forget(name)
                if engine.end is None or self.end is not None:
                    raise
            except BaseException:
                self._forget(name)
                raise

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; unknown ids are ignored."""
        by_engine: dict[RemoteEngine, list[str]] = {}
        for name in request_ids:
            self._homes.take(name)
            if (entry := self._running.get(name)) is not None:
                by_engine.setdefault(entry.engine, []).append(name)
                if entry.engine.keeps(name):
                    self._forget(name)
        for engine, names in by_engine.items():
            await engine.abort(names)

    async def outputs(self) -> AsyncIterator[list[EngineOutput]]:
        """Everything the engines emit, for one consumer; ends when the client is closed."""
        running = self._running
        async for batch in self._queue.read():
            for output in batch:
                entry = running.get(output.request_id)
                if entry is None:
                    continue
                entry.num_tokens += len(output.token_ids)
                if output.finish_reason is not None:
                    self._ended(output, entry)
            yield batch

    async def stats(self) -> EngineStats:
        """The sums over all engines, and in `ranks` those of each: the last known ones where it does not answer."""
        await asyncio.gather(*(self._ask(place, self._stats) for place in range(len(self._engines))))
        return joined_stats(self._stats)

    async def call(self, method: str, arguments: dict[str, Any] | None = None) -> Any:
        """Calls a control method of every engine and joins the answers; raises `RuntimeError` naming the rank.

        Raises `EngineDeadError` before any of them is called when one is not there, except for questions. The method
        "scale_elastic_ep" changes their number, also where the caller is cancelled, once calls that came before it have
        ended; meanwhile those of `_CHANGES` are refused.
        """
        scaling = self._scaling is not None or self._scaling_told
        if method == "is_scaling_elastic_ep":
            return scaling
        if scaling and method in _CHANGES:
            raise RuntimeError("the number of engines is being changed; ask again when that has ended")
        if method == "scale_elastic_ep":
            return await self._scale(**(arguments or {}))
        there = [place for place, engine in enumerate(self._engines) if engine.error is None]
        if len(there) < len(self._engines) and (method not in _QUESTIONS or not there):
            place = next(place for place in range(len(self._engines)) if place not in there)
            raise EngineDeadError(self._named(place, self._engines[place].error))
        calls = (self._engines[place].call(method, arguments) for place in there)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for place, answer in zip(there, answers, strict=True):
            if isinstance(answer, RuntimeError):
                raise type(answer)(self._named(place, str(answer))) from None
            if isinstance(answer, BaseException):
                raise answer
        found: list[Any] = list(answers)
        return joined_history(found) if method == "history" else joined_answers(found)

    async def drop(self, error: str) -> None:
        """Detaches from all engines and ends every unfinished request with `error`."""
        await asyncio.gather(*(engine.drop(error) for engine in self._engines))

    async def close(self) -> None:
        """Ends the connections, and the engine processes when this client started them. May be called twice."""
        await self.drop("the engine was shut down")
        self._queue.close()
        if self.on_close is not None:
            await self.on_close()

    def _named(self, place: int, text: str | None) -> str:
        return f"engine {self._ranks.start + place}: {text}" if len(self._ranks) > 1 else str(text)

    def _place(self, request: EngineRequest) -> int:
        before = self._homes.take(request.follows) or self._homes.take(request.request_id)
        if before is not None and before.end is None and before in self._engines:
            return self._engines.index(before)
        places = range(len(self._engines))
        open_ones = [place for place in places if self._engines[place].error is None]
        starting = [place for place in places if self._engines[place].end is None]
        if not (open_ones or starting):
            raise EngineDeadError(self.end or "there is no engine")
        return self._choice.choose(request, open_ones or starting)

    def _ended(self, output: EngineOutput, entry: _Running) -> None:
        name = output.request_id
        if output.finish_reason == "error" and output.fault == "lost":
            self._homes.note(name, entry.engine)
            self._forget(name)
            return
        self._forget(name, entry.num_tokens if output.finish_reason in ("stop", "length") else None)

    def _forget(self, name: str, num_tokens: int | None = None) -> None:
        entry = self._running.pop(name, None)
        if entry is not None:
            self._choice.end(entry.place, entry.cost, num_tokens)

    async def _ask(self, place: int, stats: list[EngineStats]) -> None:
        engine, rank = self._engines[place], self._ranks[place]
        try:
            found = await engine.stats()
        except EngineDeadError:
            found = stats[place]
        stats[place] = msgspec.structs.replace(found, rank=rank, problem=engine.error)

    async def _scale(self, new_data_parallel_size: int) -> bool:
        if self._scaling is not None:
            raise RuntimeError("the number of engines is being changed already; ask again when that has ended")
        self._scaling = asyncio.create_task(self._scale_awake(new_data_parallel_size))
        self._scaling.add_done_callback(self._scaled)
        return await asyncio.shield(self._scaling)

    async def _scale_awake(self, size: int) -> bool:
        """Raises what `ElasticEngines.scale` raises, and `RuntimeError` while requests are held back."""
        for question, state in (("is_paused", "paused: resume"), ("is_sleeping", "asleep: wake")):
            if await self.call(question):
                raise RuntimeError(f"the engines are {state} them before their number changes")
        return await self.on_scale(size)

    def _scaled(self, task: asyncio.Task[bool]) -> None:
        self._scaling = None
        if not task.cancelled():
            task.exception()  # nobody may have waited for it

    async def _replace(self, message: Engines) -> None:
        """Has so many other engines from now on, which get the requests of the present ones."""
        before, self._info = self._engines, self.info if self.ready else self._info
        self._ranks = range(message.size)
        self._engines = [RemoteEngine(self._queue, self._key) for _ in self._ranks]
        self._stats = [EngineStats() for _ in self._ranks]
        self._choice.forget()
        await asyncio.gather(*(one.news(EngineDown(message.error, final=True, away=True)) for one in before))


async def _fixed(size: int) -> bool:
    raise RuntimeError(f"this client cannot ask for {size} engines")


def make_client(
    config: FrameConfig, descriptor: int | None = None, process: int = 0
) -> RemoteEngine | DataParallelClient:
    """The client of the engines of this server. `descriptor`: the memory that API processes share."""
    parallel, elastic = config.data_parallel, is_elastic(config)
    ranks = parallel.served_ranks
    if len(ranks) == 1 and not elastic:
        return RemoteEngine()
    most = MOST_LOCAL if elastic else len(ranks)
    choice = RankChoice(most, descriptor, process, cached=config.cache.enable_prefix_caching)
    return DataParallelClient(ranks, choice, parallel.key() if parallel.remote_ranks else b"")


async def start_engine(config: FrameConfig, command: Sequence[str] | None = None) -> RemoteEngine | DataParallelClient:
    """Starts the engine processes of a configuration and returns their client once all are ready.

    A process is started again when it dies, `server.max_engine_restarts` times in a row; `close` ends them. Raises
    `EngineDeadError` with the cause when one does not become ready, `ConfigError` for `headless`.
    """
    if config.data_parallel.headless:
        raise ConfigError("headless is for `frame serve`, which starts engines for a server elsewhere")
    client = make_client(config)
    supervisor = DataParallelSupervisor(config, client.news, command)
    client.on_close = supervisor.stop
    if isinstance(client, DataParallelClient):
        client.on_scale = supervisor.engines.scale
    await supervisor.start()
    return client
