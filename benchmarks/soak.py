"""Runs a server under mixed load with aborts, hang-ups and kills, and says whether anything was lost or grew.

    python benchmarks/soak.py                              # an hour on the demo model
    python benchmarks/soak.py --seconds 60 --kill-every 15

Every request that is not aborted must end with the text of an undisturbed run of the same request (or, where logits
nearly tie, with as many tokens); at the end no request, KV block, file descriptor or process may be left, and memory
must not have grown since the warm-up. Prints a JSON report and ends with status 1 when anything of that failed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

PROMPTS = ("Once upon a time", "The sea is", "A cat and a dog", "My friend", "The little house by the sea. " * 12)
CLIENTS = 8
#: Memory that a process may gain after its warm-up: allocators keep what they once needed.
GROWTH_BYTES = 64 << 20


@dataclass
class Tally:
    """What happened so far."""

    counts: Counter[str] = field(default_factory=Counter)
    lost: list[str] = field(default_factory=list)
    outages: list[float] = field(default_factory=list)
    memory: dict[str, list[int]] = field(default_factory=dict)  # process -> bytes, sampled
    files: dict[str, list[int]] = field(default_factory=dict)


class Soak:
    """One server and its clients."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.tally = Tally()
        self.wanted: dict[str, dict[int, str]] = {}
        self.random = random.Random(options.seed)
        self.log = tempfile.TemporaryFile("w+")  # noqa: SIM115  # closed with the soak
        command = [sys.executable, "-m", "frame", "serve", *options.arguments, "--port", "0", "--disable-access-log"]
        self.server = subprocess.Popen(command, stderr=self.log, env={**os.environ, "OMP_NUM_THREADS": "1"})
        self.url = self._find_url()
        self.end = 0.0

    def _text(self) -> str:
        self.log.flush()
        return Path(f"/proc/self/fd/{self.log.fileno()}").read_text(errors="replace")

    def _find_url(self) -> str:
        deadline = time.monotonic() + 300
        while time.monotonic() < deadline and self.server.poll() is None:
            match = re.search(r"serving .* at (http://\S+)", self._text())
            if match:
                return match.group(1)
            time.sleep(0.1)
        self.server.kill()
        raise SystemExit(f"the server does not start:\n{self._text()}")

    def children(self) -> dict[str, int]:
        """Name -> pid of the server's processes."""
        found = {"parent": self.server.pid}
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[1]) == self.server.pid and fields[0] != "Z":
                    command = (entry / "cmdline").read_bytes().decode()
                    name = "api" if "\0api\0" in command else "engine"
                    found[name if name not in found else f"{name}-{entry.name}"] = int(entry.name)
            except (OSError, IndexError, ValueError):
                continue
        return found

    async def run(self) -> dict[str, Any]:
        """The whole soak; returns the report."""
        async with httpx.AsyncClient(base_url=self.url, timeout=300, limits=httpx.Limits(max_connections=64)) as client:
            for request in self._all_requests():
                self.wanted[json.dumps(request)], _ = await self._stream(client, request)
            started = time.monotonic()
            self.end = started + self.options.seconds
            workers = [asyncio.create_task(self._work(client)) for _ in range(CLIENTS)]
            sampler = asyncio.create_task(self._sample())
            killer = asyncio.create_task(self._kill(client))
            await asyncio.gather(*workers)
            for task in (sampler, killer):
                task.cancel()
            await asyncio.gather(sampler, killer, return_exceptions=True)
            report = await self._rest(client)
        report["seconds"] = round(time.monotonic() - started, 1)
        return self._stop(report)

    def _all_requests(self) -> list[dict[str, Any]]:
        kinds: list[Mapping[str, Any]] = [
            {"temperature": 0},
            {"temperature": 1, "seed": 11},
            {"temperature": 0.8, "seed": 12, "presence_penalty": 1.0, "n": 2},
            {"temperature": 1, "seed": 13, "logprobs": 2},
        ]
        return [
            {"model": "demo", "prompt": prompt, "max_tokens": length, "ignore_eos": True, **kind}
            for prompt in PROMPTS
            for kind in kinds
            for length in (8, 64)
        ]

    async def _stream(
        self, client: httpx.AsyncClient, request: dict[str, Any], leave_after: int | None = None
    ) -> tuple[dict[int, str], int]:
        """Texts by index, and the tokens of all; leaves after so many events when asked to."""
        texts: dict[int, str] = {}
        body = {**request, "stream": True, "stream_options": {"include_usage": True}}
        tokens = events = 0
        async with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise RuntimeError(f"status {response.status_code}: {(await response.aread())[:200]!r}")
            async for line in response.aiter_lines():
                if not line.startswith("data: ") or line == "data: [DONE]":
                    continue
                event = json.loads(line[6:])
                if "error" in event:
                    raise RuntimeError(event["error"]["message"])
                for choice in event["choices"]:
                    texts[choice["index"]] = texts.get(choice["index"], "") + choice["text"]
                tokens = (event.get("usage") or {}).get("completion_tokens", tokens)
                events += 1
                if leave_after is not None and events >= leave_after:
                    return texts, -1
        return texts, tokens

    async def _work(self, client: httpx.AsyncClient) -> None:
        """Sends requests until the time is over; some are left in the middle, some not read at all."""
        while time.monotonic() < self.end:
            request = self.random.choice(self._all_requests())
            way = self.random.random()
            try:
                if way < 0.15:
                    await self._stream(client, request, self.random.randrange(1, 6))
                    self.tally.counts["hung up"] += 1
                elif way < 0.25:
                    await asyncio.wait_for(self._stream(client, request), self.random.random())
                    self.tally.counts["quick"] += 1
                else:
                    self._judge(request, *await self._stream(client, request))
            except TimeoutError:
                self.tally.counts["aborted"] += 1
            except (httpx.HTTPError, RuntimeError, json.JSONDecodeError) as error:
                self.tally.lost.append(f"{type(error).__name__}: {error}"[:300])

    def _judge(self, request: dict[str, Any], texts: dict[int, str], tokens: int) -> None:
        expected = request["max_tokens"] * request.get("n", 1)
        if tokens != expected:
            self.tally.lost.append(f"{tokens} tokens instead of {expected}")
        elif texts == self.wanted[json.dumps(request)]:
            self.tally.counts["equal"] += 1
        else:
            self.tally.counts["parted at a near tie"] += 1

    async def _kill(self, client: httpx.AsyncClient) -> None:
        """Kills the engine now and then, also while it loads, and times how long it is away."""
        while self.options.kill_every:
            await asyncio.sleep(self.options.kill_every * self.random.uniform(0.6, 1.4))
            if self.end - time.monotonic() < 15:
                return
            start = time.monotonic()
            self._kill_engine()
            again = self.random.random() < 0.2
            if again:
                await asyncio.sleep(1)
                self._kill_engine()
            while (await client.get("/ready")).status_code != 503:
                await asyncio.sleep(0.01)
            while (await client.get("/ready")).status_code != 200:
                await asyncio.sleep(0.05)
            self.tally.counts["kills"] += 1 + again
            if not again:
                self.tally.outages.append(round(time.monotonic() - start, 2))

    def _kill_engine(self) -> None:
        pid = self.children().get("engine")
        if pid is not None:
            os.kill(pid, signal.SIGKILL)

    async def _sample(self) -> None:
        """Memory and descriptors of each process that has lived for a while."""
        while True:
            await asyncio.sleep(max(2.0, self.options.seconds / 200))
            for name, pid in self.children().items():
                try:
                    size = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
                    files = len(os.listdir(f"/proc/{pid}/fd"))
                except OSError:
                    continue
                self.tally.memory.setdefault(f"{name} {pid}", []).append(size)
                self.tally.files.setdefault(f"{name} {pid}", []).append(files)

    async def _rest(self, client: httpx.AsyncClient) -> dict[str, Any]:
        """What is left once nobody asks for anything."""
        stats: dict[str, Any] = {}
        for _ in range(100):
            stats = (await client.get("/stats")).json()["engine"]
            if not (stats["running"] or stats["waiting"] or stats["kv_usage"]):
                break
            await asyncio.sleep(0.1)
        left = {name: stats[name] for name in ("running", "waiting", "kv_usage")}
        return {"left": left, "processes": sorted(name.split("-")[0] for name in self.children())}

    def _stop(self, report: dict[str, Any]) -> dict[str, Any]:
        before = list(self.children().values())
        self.server.send_signal(signal.SIGTERM)
        report["exit_status"] = self.server.wait(60)
        report["processes_left"] = [pid for pid in before if Path(f"/proc/{pid}").exists()]
        tally = self.tally
        growth = {name: _growth(samples) for name, samples in tally.memory.items() if len(samples) >= 8}
        files = {name: max(some) - some[len(some) // 4] for name, some in tally.files.items() if len(some) >= 8}
        outages = sorted(tally.outages)
        report |= {
            "requests": sum(tally.counts[kind] for kind in tally.counts if kind != "kills") + len(tally.lost),
            **tally.counts,
            "lost": len(tally.lost),
            "losses": tally.lost[:10],
            "outage_seconds": {"median": outages[len(outages) // 2], "most": outages[-1]} if outages else None,
            "memory_growth_mib": {name: round(grown / 2**20, 1) for name, grown in growth.items()},
            "more_descriptors": files,
        }
        clean = not any(report["left"].values()) and report["processes"].count("engine") == 1
        flat = all(grown < GROWTH_BYTES for grown in growth.values()) and all(more < 64 for more in files.values())
        ended = not report["processes_left"] and report["exit_status"] == 0
        report["ok"] = not tally.lost and tally.counts["equal"] > 0 and clean and flat and ended
        if not report["ok"]:
            report["log"] = self._text()[-4000:]
        return report


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
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("arguments", nargs="*", help="for `frame serve`, after --")
    process = Soak(parser.parse_args(arguments))
    try:
        return asyncio.run(process.run())
    finally:
        if process.server.poll() is None:
            process.server.kill()
        process.server.wait()
        process.log.close()


if __name__ == "__main__":
    report = soak()
    print(json.dumps(report, indent=2))
    sys.exit(0 if report["ok"] else 1)
