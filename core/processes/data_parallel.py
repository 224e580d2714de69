"""Several engines of one model as one: their client, which divides requests among them, and their supervisor.

Each engine is a data rank with devices and a KV cache of its own. Unless they share experts none waits for another, and
when one dies only its requests wait until it is there again. Imports no torch.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from typing import Any

import msgspec

from ..config.errors import ConfigError
from ..config.tree import FrameConfig
from ..interfaces.client import EngineDeadError, EngineInfo
from ..interfaces.engine import EngineOutput, EngineRequest, EngineStats
from ..plugin_host.registry import Registry
from ..plugin_host.setups import mesh_of
from .child import STOP_SECONDS
from .client import RemoteEngine
from .machines import Machines
from .messages import EngineNews
from .output_queue import OutputQueue
from .rank_choice import RankChoice
from .rank_stats import joined_answers, joined_history, joined_stats
from .shared_fate import OwnFate, SharedFate
from .supervisor import EngineSupervisor, News

#: Control methods that only ask: they are answered while an engine is down, too.
_QUESTIONS = frozenset(("is_paused", "is_sleeping", "history"))
#: Lost requests whose engine is remembered.
_MOST_LOST = 1 << 16


class _Running(msgspec.Struct):
    """A request that an engine has: the engine's place, what the request costs it, and the tokens that came."""

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
        self._ranks, self._choice = ranks, choice
        self._queue = OutputQueue()
        self._engines = [RemoteEngine(self._queue, key) for _ in ranks]
        self._running: dict[str, _Running] = {}
        self._lost: dict[str, int] = {}  # request → place of the engine that died with it
        self._stats = [EngineStats() for _ in ranks]  # the last known ones

    @property
    def ready(self) -> bool:
        """Whether every engine was ready once."""
        return all(engine.ready for engine in self._engines)

    @property
    def info(self) -> EngineInfo:
        """Facts of the engines, whose caches may differ: what all of them can do."""
        infos = [engine.info for engine in self._engines if engine.ready] or [self._engines[0].info]
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

    async def news(self, message: EngineNews) -> None:
        """Handles a message of the supervisor of one engine."""
        await self._engines[message.rank - self._ranks.start].news(message)

    async def add(self, request: EngineRequest) -> None:
        """Sends a request to the engine that has the least to do with it; raises as `RemoteEngine.add` does."""
        name = request.request_id
        while True:
            place = self._place(request)
            entry = self._running[name] = _Running(place, self._choice.cost(request))
            self._choice.begin(place, entry.cost)
            try:
                await self._engines[place].add(request)
                return
            except EngineDeadError:  # it went while the request waited for it; another one may be there
                self._forget(name)
                if self._engines[place].end is None or self.end is not None:
                    raise
            except BaseException:
                self._forget(name)
                raise

    async def abort(self, request_ids: Iterable[str]) -> None:
        """Ends requests; unknown ids are ignored."""
        by_place: dict[int, list[str]] = {}
        for name in request_ids:
            self._lost.pop(name, None)
            if (entry := self._running.get(name)) is not None:
                by_place.setdefault(entry.place, []).append(name)
                if self._engines[entry.place].keeps(name):
                    self._forget(name)
        for place, names in by_place.items():
            await self._engines[place].abort(names)

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
        await asyncio.gather(*(self._ask(place) for place in range(len(self._engines))))
        return joined_stats(self._stats)

    async def call(self, method: str, arguments: dict[str, Any] | None = None) -> Any:
        """Calls a control method of every engine and joins the answers; raises `RuntimeError` naming the rank.

        Raises `EngineDeadError` before any of them is called when one is not there, except for questions.
        """
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
        return f"engine {self._ranks[place]}: {text}"

    def _place(self, request: EngineRequest) -> int:
        before = self._lost.pop(request.request_id, None)
        if before is not None and self._engines[before].end is None:
            return before
        places = range(len(self._engines))
        open_ones = [place for place in places if self._engines[place].error is None]
        starting = [place for place in places if self._engines[place].end is None]
        if not (open_ones or starting):
            raise EngineDeadError(self.end or "there is no engine")
        return self._choice.choose(request, open_ones or starting)

    def _ended(self, output: EngineOutput, entry: _Running) -> None:
        name = output.request_id
        if output.finish_reason == "error" and output.fault == "lost":
            self._lost[name] = entry.place
            while len(self._lost) > _MOST_LOST:  # requests that nobody wants any more do not come again
                del self._lost[next(iter(self._lost))]
            self._forget(name)
            return
        self._forget(name, entry.num_tokens if output.finish_reason in ("stop", "length") else None)

    def _forget(self, name: str, num_tokens: int | None = None) -> None:
        entry = self._running.pop(name, None)
        if entry is not None:
            self._choice.end(entry.place, entry.cost, num_tokens)

    async def _ask(self, place: int) -> None:
        engine, rank = self._engines[place], self._ranks[place]
        try:
            found = await engine.stats()
        except EngineDeadError:
            found = self._stats[place]
        self._stats[place] = msgspec.structs.replace(found, rank=rank, problem=engine.error)


class DataParallelSupervisor:
    """Keeps the engines of this machine alive: each by itself, or those that share experts together.

    `news` is awaited for every stage, start and death, also of engines that other machines start for this server.
    """

    def __init__(self, config: FrameConfig, news: News, command: Sequence[str] | None = None) -> None:
        self._config = config
        ranks, shared = config.data_parallel.local_ranks, mesh_of(config).data > 1
        self._fate = fate = SharedFate() if shared and len(ranks) > 1 else OwnFate()
        self._supervisors = {rank: EngineSupervisor(config, news, command, rank, fate) for rank in ranks}
        if isinstance(fate, SharedFate):
            for one in self._supervisors.values():
                fate.add(one)
        self._machines = Machines(config, news, lambda: self.config) if config.data_parallel.remote_ranks else None

    @property
    def config(self) -> FrameConfig:
        """The configuration with the weights that engines serve by now."""
        newest = next(iter(self._supervisors.values())).config
        return self._config.model_copy(update={"model": newest.model, "load": newest.load})

    async def start(self) -> None:
        """Starts all engines at once and returns when they are ready; raises `EngineDeadError` and leaves none.

        Raises `ValueError` where it cannot listen for other machines.
        """
        if self._machines is not None:
            self._machines.listen()
        choices = Registry.load().choices(self._config)
        starts: dict[int, asyncio.Task[Any]] = {
            rank: asyncio.create_task(one.start(choices)) for rank, one in self._supervisors.items()
        }
        others = [] if self._machines is None else [asyncio.create_task(self._machines.start())]
        tasks = [*starts.values(), *others]
        try:
            await asyncio.gather(*tasks)
        except BaseException as error:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self.stop(0)
            if isinstance(error, EngineDeadError) and len(tasks) > 1:
                for rank, task in starts.items():
                    if not task.cancelled() and task.exception() is error:
                        raise EngineDeadError(f"engine {rank}: {error}") from None
            raise

    async def wait(self) -> None:
        """Returns when no engine will be started any more (the last `EngineDown` of each says why)."""
        await asyncio.gather(*(one.wait() for one in self._supervisors.values()))
        if self._machines is not None:
            await self._machines.wait()

    async def stop(self, seconds: float = STOP_SECONDS) -> None:
        """Ends all engine processes, by force after `seconds`. May be called twice."""
        if self._machines is not None:
            await self._machines.stop()
        await asyncio.gather(*(one.stop(seconds) for one in self._supervisors.values()))
        self._fate.close()


def make_client(
    config: FrameConfig, descriptor: int | None = None, process: int = 0
) -> RemoteEngine | DataParallelClient:
    """The client of the engines of this server. `descriptor`: the memory that API processes share."""
    parallel = config.data_parallel
    ranks = parallel.served_ranks
    if len(ranks) == 1:
        return RemoteEngine()
    choice = RankChoice(len(ranks), descriptor, process, cached=config.cache.enable_prefix_caching)
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
    await supervisor.start()
    return client
