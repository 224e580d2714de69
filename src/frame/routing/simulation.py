"""Replays requests over simulated servers, to compare route policies. Equal arguments give equal results.

A server computes in steps, as an engine with continuous batching does: each step makes a token for every request that
has its prompt, and computes what fits of the prompts of others, first come, first served. Its prefix cache keeps blocks
of prompts and forgets those that were used longest ago. Times are those of the model, not of this process.
"""

from __future__ import annotations

import heapq
import reprlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from frame.core.interfaces.provider import PluginError
from frame.kv_events.changes import KVChange, KVRemoved, KVStored

from .policy import RoutePolicy, RouteRequest, ServerRole


@dataclass(frozen=True, kw_only=True)
class ServiceModel:
    """How fast a server is, and what it holds. `event_seconds` pass until the front knows what has been cached."""

    prefill_rate: float = 10_000.0
    step_seconds: float = 0.008
    request_seconds: float = 0.0001
    max_batched_tokens: int = 2048
    max_requests: int = 128
    cache_tokens: int = 200_000
    block_size: int = 16
    event_seconds: float = 0.02


@dataclass(frozen=True)
class TracedRequest:
    """A request that arrives `at` seconds after the start, with the tokens of its prompt and of its answer."""

    at: float
    path: str
    body: bytes
    tokens: array[int]
    output_len: int


@dataclass
class SimulatedRun:
    """What came of a replay. Times are in seconds, by request; `busy` and `requests` by server."""

    policy: str
    num_servers: int
    prompt_tokens: int = 0
    cached_tokens: int = 0
    ttfts: list[float] = field(default_factory=list)
    latencies: list[float] = field(default_factory=list)
    busy: list[float] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        """The share of prompts' tokens that were cached where the prompts went."""
        return self.cached_tokens / self.prompt_tokens if self.prompt_tokens else 0.0

    @property
    def imbalance(self) -> float:
        """How long the busiest server computed, by the mean of all: 1 is even."""
        total = sum(self.busy)
        return max(self.busy) * len(self.busy) / total if total else 1.0


@dataclass(eq=False)
class _Running:
    """A request at a server. `cached` tokens were there, `left` are to be computed."""

    traced: TracedRequest
    cached: int = 0
    left: int = 0
    num_output: int = 0
    keys: list[int] = field(default_factory=list)

    @property
    def num_tokens(self) -> int:
        return len(self.traced.tokens) + self.traced.output_len


class SimulatedServer:
    """One server. A policy reads its first five attributes."""

    def __init__(self, url: str, model: ServiceModel) -> None:
        self.url = url
        self.role: ServerRole = "serve"
        self.in_flight = 0
        self.num_other = 0
        self.kv_usage: float | None = 0.0
        self.num_requests = 0
        self.busy = 0.0
        self._model = model
        self._waiting: deque[_Running] = deque()
        self._running: list[_Running] = []
        self._cache: OrderedDict[int, None] = OrderedDict()
        self._most_blocks = max(1, model.cache_tokens // model.block_size)

    @property
    def idle(self) -> bool:
        return not self._waiting and not self._running

    def take(self, traced: TracedRequest) -> None:
        """A request arrives."""
        self.in_flight += 1
        self.num_requests += 1
        self._waiting.append(_Running(traced))

    def plan(self) -> tuple[float, list[tuple[_Running, int]]]:
        """The seconds of the next step, and how many tokens of which prompts it computes."""
        self._admit()
        decoding = sum(one.left == 0 for one in self._running)
        budget, parts = self._model.max_batched_tokens - decoding, []
        for one in self._running:
            if one.left and budget > 0:
                parts.append((one, min(budget, one.left)))
                budget -= parts[-1][1]
        prefill = sum(count for _, count in parts)
        seconds = self._model.step_seconds + self._model.request_seconds * decoding + prefill / self._model.prefill_rate
        self.busy += seconds
        return seconds, parts

    def finish(self, parts: Iterable[tuple[_Running, int]]) -> tuple[list[_Running], list[_Running], list[KVChange]]:
        """Ends a step: the requests that got their first token, those that are done, and what the cache has changed."""
        changes: list[KVChange] = []
        computed = dict(parts)
        begun, done = [], []
        for one in self._running:
            if one in computed:
                before = len(one.traced.tokens) - one.left
                one.left -= computed[one]
                changes += self._store(one, before, len(one.traced.tokens) - one.left)
                if one.left:
                    continue
                begun.append(one)
            elif one.left:
                continue
            one.num_output += 1
            if one.num_output >= one.traced.output_len:
                done.append(one)
        for one in done:
            self._running.remove(one)
            self._touch(one.keys)
            self.in_flight -= 1
        return begun, done, changes

    def _admit(self) -> None:
        used = sum(one.num_tokens for one in self._running)
        while self._waiting and len(self._running) < self._model.max_requests:
            first = self._waiting[0]
            used += first.num_tokens
            if used > self._model.cache_tokens and self._running:
                break
            self._waiting.popleft()
            first.keys = block_keys(first.traced.tokens, self._model.block_size)
            # one token at least is computed
            whole = (len(first.traced.tokens) - 1) // self._model.block_size
            hits = 0
            while hits < whole and first.keys[hits] in self._cache:
                hits += 1
            self._touch(first.keys[:hits])
            first.cached = hits * self._model.block_size
            first.left = len(first.traced.tokens) - first.cached
            self._running.append(first)
        self.kv_usage = min(1.0, used / self._model.cache_tokens)

    def _touch(self, keys: Sequence[int]) -> None:
        """Uses blocks, from the last to the first, so that beginnings are kept longest."""
        for key in reversed(keys):
            if key in self._cache:
                self._cache.move_to_end(key)

    def _store(self, one: _Running, start: int, end: int) -> list[KVChange]:
        """Caches the blocks that are full between two tokens of a prompt."""
        size = self._model.block_size
        first, last = start // size, end // size
        new = [place for place in range(first, last) if one.keys[place] not in self._cache]
        changes: list[KVChange] = []
        if new:
            first = new[0]
            names = one.keys[first:last]
            self._cache |= dict.fromkeys(names)
            tokens = one.traced.tokens[first * size : last * size]
            changes.append(KVStored(names, one.keys[first - 1] if first else None, tokens, size))
        gone = []
        while len(self._cache) > self._most_blocks:
            gone.append(self._cache.popitem(last=False)[0])
        if gone:
            changes.append(KVRemoved(gone))
        return changes


def block_keys(tokens: array[int], size: int) -> list[int]:
    """A key for each full block, that stands for all tokens up to its end."""
    key, data, width = 0, tokens.tobytes(), tokens.itemsize * size
    found = []
    for start in range(0, len(data) - width + 1, width):
        key = hash((key, data[start : start + width]))
        found.append(key)
    return found


class _Clock:
    """What is to happen, in order of time, and of being named where times are equal."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, seconds: float, what: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._due, (seconds, self._count, what))

    def run(self) -> None:
        while self._due:
            self.now, _, what = heapq.heappop(self._due)
            what()


def _chosen(
    policy: RoutePolicy, name: str, request: RouteRequest, servers: Sequence[SimulatedServer]
) -> SimulatedServer:
    try:
        server = policy.choose(request, servers)
    except Exception as error:  # of a plugin, which may raise anything
        said = " ".join(f"{type(error).__name__}: {error}".split())
        raise PluginError(f"route policy {name!r} has not chosen a server: {said}") from error
    for one in servers:
        if server is one:
            return one
    there = ", ".join(one.url for one in servers)
    raise PluginError(f"route policy {name!r} names {reprlib.repr(server)}; there are: {there}")


def simulate(
    policy: RoutePolicy, name: str, trace: Sequence[TracedRequest], num_servers: int, model: ServiceModel
) -> SimulatedRun:
    """Replays a trace; `policy` is a new one, called `name` in the result. Raises `PluginError` where it is wrong."""
    clock, run = _Clock(), SimulatedRun(name, num_servers)
    servers = [SimulatedServer(f"http://server-{place}", model) for place in range(num_servers)]

    def arrive(traced: TracedRequest) -> None:
        request = RouteRequest(traced.path, traced.body)
        request.tokens = traced.tokens
        server = _chosen(policy, name, request, servers)
        was_idle = server.idle
        server.take(traced)
        if was_idle:
            step(server)

    def step(server: SimulatedServer) -> None:
        seconds, parts = server.plan()
        clock.at(clock.now + seconds, lambda: end(server, parts))

    def end(server: SimulatedServer, parts: list[tuple[_Running, int]]) -> None:
        begun, done, changes = server.finish(parts)
        for one in begun:
            run.ttfts.append(clock.now - one.traced.at)
            run.prompt_tokens += len(one.traced.tokens)
            run.cached_tokens += one.cached
        run.latencies += [clock.now - one.traced.at for one in done]
        run.seconds = clock.now
        if changes:
            clock.at(clock.now + model.event_seconds, lambda: tell(server, changes))
        if not server.idle:
            step(server)

    def tell(server: SimulatedServer, changes: list[KVChange]) -> None:
        for change in changes:
            policy.kv_changed(server.url, 0, change)

    for traced in trace:
        clock.at(traced.at, lambda traced=traced: arrive(traced))  # type: ignore[misc]
    clock.run()
    run.busy = [server.busy for server in servers]
    run.requests = [server.num_requests for server in servers]
    return run
