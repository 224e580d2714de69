"""Runs a server under mixed load with aborts, hang-ups and kills, and says whether anything was lost or grew.

    python -m benchmarks.soak                                     # an hour on the demo model
    python -m benchmarks.soak --seconds 60 --kill-every 15
    python -m benchmarks.soak --seconds 600 -- --executor process

Every request that is not aborted must end as in an undisturbed run of the same request: a deterministic one with the
same bits, another one with the same text or, where logits nearly tie, with as many tokens. Streams break with their
API process and are asked again. The engine is killed while it computes, while its successor loads, and as soon as that
is ready; also its standby, its worker process if it has one, and API processes. In the last quarter nobody is killed,
so that memory can be watched. At the end no request, KV block, file descriptor or process may be left. Prints a JSON
report and ends with status 1 when anything of that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import httpx

from benchmarks.soak_requests import Answer, Question, Refused, ask, questions, verdict
from benchmarks.soak_server import SoakServer, num_descriptors, resident_bytes

CLIENTS = 8
#: Memory that a process may gain after its warm-up: allocators keep what they once needed.
GROWTH_BYTES = 64 << 20
#: Descriptors that a process may have more at rest than before the first request: caches of connections and the like.
MORE_DESCRIPTORS = 8
#: The last kill comes after this share of the time.
KILLING = 0.75
#: What is killed, and how often.
KILLS = {"engine": 60, "engine twice": 12, "engine when ready": 10, "standby": 6, "worker": 20, "api": 6}


@dataclass
class Tally:
    """What happened so far."""

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    outages: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    memory: dict[tuple[str, int], list[int]] = field(default_factory=dict)  # (name, pid) -> bytes, sampled


class Soak:
    """One server and its clients."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tally = Tally()
        self.questions = questions()[:: -options.every][::-1]
        self.wanted: list[Answer] = []
        self.random = random.Random(options.seed)
        self.server = SoakServer(["--api-server-count", str(options.apis), *options.arguments])
        self.api_killed = 0.0  # when last
        self.end = 0.0

    async def run(self) -> dict[str, Any]:
        """The whole soak; returns the report."""
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=self.server.url, timeout=300, limits=limits) as client:
            self.wanted = await self._undisturbed(client)
            before = self._descriptors()
            started = time.monotonic()
            self.end = started + self.options.seconds
            beside = [asyncio.create_task(work(client)) for work in (self._sample, self._kill)]
            await asyncio.gather(*(self._work(client) for _ in range(CLIENTS)))
            for task in beside:
                task.cancel()
            ended = await asyncio.gather(*beside, return_exceptions=True)
            for error in ended:
                if isinstance(error, Exception):
                    raise error
            seconds = time.monotonic() - started
        async with httpx.AsyncClient(base_url=self.server.url, timeout=60) as client:
            report = {"seconds": round(seconds, 1), **await self._rest(client, before)}
        return self._stop(report)

    async def _undisturbed(self, client: httpx.AsyncClient) -> list[Answer]:
        """What everything that will be asked is answered."""
        places = asyncio.Semaphore(CLIENTS)

        async def one(question: Question) -> Answer:
            async with places:
                return await ask(client, question) or Answer()

        return list(await asyncio.gather(*map(one, self.questions)))

    async def _work(self, client: httpx.AsyncClient) -> None:
        """Sends requests until the time is over; some are left in the middle, some not waited for."""
        while time.monotonic() < self.end:
            number = self.random.randrange(len(self.questions))
            question, way = self.questions[number], self.random.random()
            try:
                if way < 0.15:
                    left = await ask(client, question, self.random.randrange(1, 6)) is None
                    self.tally.counts["hung up" if left else "quick"] += 1
                elif way < 0.25:
                    await asyncio.wait_for(ask(client, question), self.random.random())
                    self.tally.counts["quick"] += 1
                else:
                    await self._insist(client, question, self.wanted[number])
            except TimeoutError:
                self.tally.counts["aborted"] += 1
            except (httpx.HTTPError, Refused, json.JSONDecodeError) as error:
                if not self._broke(error, time.monotonic() - 30):
                    self.tally.lost.append(f"{type(error).__name__}: {error}"[:300])

    async def _insist(self, client: httpx.AsyncClient, question: Question, wanted: Answer) -> None:
        """Asks, again when the API process that answers is killed, and judges the answer."""
        while True:
            begun = time.monotonic()
            try:
                answer = await ask(client, question)
            except httpx.TransportError as error:
                if not self._broke(error, begun):
                    raise
                continue
            found = verdict(question, answer or Answer(), wanted)
            if found.startswith("wrong"):
                self.tally.lost.append(found)
            else:
                self.tally.counts[found] += 1
            return

    def _broke(self, error: Exception, begun: float) -> bool:
        """Whether a request that began then ended with its API process."""
        broke = isinstance(error, httpx.TransportError) and self.api_killed >= begun
        self.tally.counts["broken with their API process"] += broke
        return broke

    async def _kill(self, client: httpx.AsyncClient) -> None:
        """Kills processes now and then, and times how long no engine is ready."""
        last = self.end - self.options.seconds * (1 - KILLING)
        while self.options.kill_every:
            await asyncio.sleep(self.options.kill_every * self.random.uniform(0.6, 1.4))
            if time.monotonic() > last:
                return
            names = {name: weight for name, weight in KILLS.items() if self.server.pids(name.split()[0])}
            await self._kill_one(client, self.random.choices(list(names), list(names.values()))[0])

    async def _kill_one(self, client: httpx.AsyncClient, what: str) -> None:
        start = time.monotonic()
        if what == "api":
            self.api_killed = start
        self.server.kill(what.split()[0])
        self.tally.counts[f"kills of {what}"] += 1
        if what in ("standby", "api"):
            return
        if what == "engine twice":
            await asyncio.sleep(1)
            self.server.kill("engine")
        await self._until_ready(client, False)
        await self._until_ready(client, True)
        if what == "engine when ready":
            self.server.kill("engine")
            await self._until_ready(client, False)
            await self._until_ready(client, True)
        elif what != "engine twice":
            self.tally.outages.append(round(time.monotonic() - start, 2))

    async def _until_ready(self, client: httpx.AsyncClient, ready: bool) -> None:
        deadline = time.monotonic() + 120
        while await self._ready(client) is not ready and time.monotonic() < deadline:
            await asyncio.sleep(0.02)

    async def _ready(self, client: httpx.AsyncClient) -> bool | None:
        try:
            return (await client.get("/ready")).status_code == 200
        except httpx.TransportError:
            return None

    async def _sample(self, client: httpx.AsyncClient) -> None:
        """Memory of each process, while an engine is ready."""
        while True:
            await asyncio.sleep(max(1.0, self.options.seconds / 400))
            self.tally.loads.append(os.getloadavg()[0])
            processes = self.server.processes()
            if not await self._ready(client):
                continue
            for name, pid in processes:
                if name == "standby":
                    continue  # it loads its libraries, and then nothing
                try:
                    self.tally.memory.setdefault((name, pid), []).append(resident_bytes(pid))
                except OSError:
                    continue

    def _descriptors(self) -> dict[str, int]:
        """The most that a process of each name has."""
        most: dict[str, int] = {}
        for name, pid in self.server.processes():
            try:
                most[name] = max(most.get(name, 0), num_descriptors(pid))
            except OSError:
                continue
        return most

    async def _rest(self, client: httpx.AsyncClient, before: dict[str, int]) -> dict[str, Any]:
        """What is left once nobody asks for anything."""
        stats: dict[str, Any] = {}
        for _ in range(200):
            stats = (await client.get("/stats")).json()["engine"]
            if not (stats["running"] or stats["waiting"] or stats["kv_usage"]):
                break
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        more = {name: count - before[name] for name, count in self._descriptors().items() if name in before}
        return {
            "left": {name: stats[name] for name in ("running", "waiting", "kv_usage")},
            "processes": dict(Counter(name for name, _ in self.server.processes())),
            "more_descriptors": more,
        }

    def _stop(self, report: dict[str, Any]) -> dict[str, Any]:
        status, left = self.server.stop()
        tally, outages, loads = self.tally, sorted(self.tally.outages), sorted(self.tally.loads)
        growth = {f"{name} {pid}": _growth(some) for (name, pid), some in tally.memory.items() if len(some) >= 20}
        report |= {
            "exit_status": status,
            "processes_left": left,
            "requests": sum(tally.counts[kind] for kind in tally.counts if "kill" not in kind) + len(tally.lost),
            **dict(sorted(tally.counts.items())),
            "lost": len(tally.lost),
            "losses": dict(Counter(tally.lost).most_common(10)),
            "outage_seconds": _spread(outages),
            "load_of_the_machine": _spread(loads),
            "memory_growth_mib": {name: round(grown / 2**20, 1) for name, grown in growth.items()},
        }
        clean = not any(report["left"].values()) and report["processes"].get("engine") == 1
        flat = all(grown < GROWTH_BYTES for grown in growth.values())
        closed = all(more <= MORE_DESCRIPTORS for more in report["more_descriptors"].values())
        ended = not left and status == 0
        report["ok"] = not tally.lost and tally.counts["equal"] > 0 and clean and flat and closed and ended
        if not report["ok"]:
            report["log"] = self.server.text()[-4000:]
        return report


def _spread(ordered: list[float]) -> dict[str, float] | None:
    return {"median": ordered[len(ordered) // 2], "most": ordered[-1], "count": len(ordered)} if ordered else None


def _growth(samples: list[int]) -> int:
    """Median of the last quarter less that of the second one: after the warm-up."""
    quarter = len(samples) // 4
    early, late = sorted(samples[quarter : 2 * quarter]), sorted(samples[-quarter:])
    return late[len(late) // 2] - early[len(early) // 2]


def soak(arguments: list[str] | None = None) -> dict[str, Any]:
    """Runs a soak and returns its report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=3600.0, help="how long clients send requests")
    parser.add_argument("--kill-every", type=float, default=45.0, help="seconds between kills, about; 0: none")
    parser.add_argument("--apis", type=int, default=2, help="API processes")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--every", type=int, default=1, help="asks every Nth question of the list, the last included")
    parser.add_argument("arguments", nargs="*", help="for `frame serve`, after --")
    process = Soak(parser.parse_args(arguments))
    try:
        return asyncio.run(process.run())
    finally:
        process.server.close()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the server must not go on without us
    report = soak()
    print(json.dumps(report, indent=2))
    sys.exit(0 if report["ok"] else 1)
