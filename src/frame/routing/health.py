"""Looks after the servers once a second: who serves, what each has to do, and whether the list has changed."""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import msgspec

from frame.core.config.errors import ConfigError

from .fleet import Fleet, FleetServer
from .server_list import ServerFile
from .upstream import LostError, UnreachableError, Upstream

logger = logging.getLogger("frame.route")

#: Seconds that a server has to say how it is. One that is silent for longer may be busy: it is asked once more.
_ANSWER_SECONDS = 5.0
_SILENCES = 2
#: Most bytes of what a server says of its load.
_MOST_REPORT = 64 << 10
_FORM = "endpoint-load-metrics-format"
_REPORT = "endpoint-load-metrics"


class HealthWatch:
    """Asks every server each `seconds`. `file` is the list, where that is a file."""

    def __init__(self, fleet: Fleet, upstream: Upstream, seconds: float, file: ServerFile | None = None) -> None:
        self._fleet = fleet
        self._upstream = upstream
        self._seconds = seconds
        self._file = file
        self._silences: dict[FleetServer, int] = {}
        #: servers that do not say what load they have
        self._reticent: set[FleetServer] = set()

    async def run(self) -> None:
        """Looks until it is cancelled."""
        loop = asyncio.get_running_loop()
        asking: dict[FleetServer, asyncio.Task[None]] = {}
        try:
            while True:
                began = loop.time()
                for server in await self._listed():
                    if server not in asking:  # one that is slow to answer holds up no other one
                        asking[server] = asyncio.create_task(self._ask(server))
                await asyncio.sleep(max(0.0, self._seconds - (loop.time() - began)))
                for task in [task for task in asking.values() if task.done()]:
                    task.result()  # which raises what went wrong
                asking = {server: task for server, task in asking.items() if not task.done()}
        finally:
            for task in asking.values():
                task.cancel()
            await asyncio.gather(*asking.values(), return_exceptions=True)

    async def look(self) -> None:
        """Reads the list if it has changed, and asks every server once, all at the same time."""
        await asyncio.gather(*(self._ask(server) for server in await self._listed()))

    async def _listed(self) -> list[FleetServer]:
        """All servers, of the newest list; forgets what is known of others."""
        if self._file is not None and await asyncio.to_thread(self._file.changed):
            await self._reread(self._file)
        self._fleet.forget_idle()
        servers = list(self._fleet.servers)
        self._silences = {server: count for server, count in self._silences.items() if server in servers}
        self._reticent.intersection_update(servers)
        return servers

    async def _reread(self, file: ServerFile) -> None:
        try:
            entries = await asyncio.to_thread(file.read)
        except ConfigError as error:
            self._fleet.problem = str(error)
            logger.error("the list of servers stays as it was: %s", error)
        else:
            self._fleet.problem = None
            self._fleet.apply(entries)
            logger.info("%s lists %d servers", file.path, len(entries))

    async def _ask(self, server: FleetServer) -> None:
        problem, silent = await self._health(server)
        self._silences[server] = self._silences.get(server, 0) + 1 if silent else 0
        if silent and server.problem is None and self._silences[server] < _SILENCES:
            return
        if problem != server.problem:
            if problem is None:
                logger.info("%s is ready", server.url)
            else:
                logger.warning("%s gets no requests: %s", server.url, problem)
        server.problem = problem
        if problem is not None:
            self._reticent.discard(server)  # what comes back may be another version
        elif server not in self._reticent:
            await self._load(server)

    async def _health(self, server: FleetServer) -> tuple[str | None, bool]:
        """Why it serves nobody, and whether it was silent."""
        answer = None
        try:
            answer = await self._upstream.send(
                f"{server.url}/health", "GET", self._upstream.own(), None, _ANSWER_SECONDS
            )
            async with asyncio.timeout(_ANSWER_SECONDS):
                text = await answer.whole(_MOST_REPORT)
        except UnreachableError as error:
            return str(error), False
        except (LostError, TimeoutError) as error:
            return str(error) or "it does not answer /health", True
        finally:
            if answer is not None:
                answer.close()
        return (None if answer.status == 200 else _sentence(answer.status, text)), False

    async def _load(self, server: FleetServer) -> None:
        """Notes what the server says of its load, as ORCA's header or as vLLM's /load; not asked again if it is mum."""
        headers = self._upstream.own({_FORM: "JSON"})
        answer, own = None, server.in_flight
        try:
            answer = await self._upstream.send(f"{server.url}/load", "GET", headers, None, _ANSWER_SECONDS)
            async with asyncio.timeout(_ANSWER_SECONDS):
                body = await answer.whole(_MOST_REPORT)
        except (UnreachableError, LostError, TimeoutError):
            return
        finally:
            if answer is not None:
                answer.close()
        found = load_of(answer.header(_REPORT), body) if answer.status == 200 else None
        if found is None:
            server.reported(0, None)
            if answer.status >= 500:
                return
            self._reticent.add(server)
            logger.info("%s does not say what load it has; this front's own requests count alone", server.url)
        else:
            server.reported(*found, own)


def load_of(report: str, body: bytes) -> tuple[int, float | None] | None:
    """Requests and used share of the KV cache, from a report in ORCA's JSON or the body of /load; None for neither."""
    named = _json(report[5:].encode(errors="replace")).get("named_metrics") if report.startswith("JSON ") else None
    if isinstance(named, dict):
        counts = [_count(named.get(f"num_requests_{name}")) for name in ("running", "waiting")]
        usage = named.get("kv_cache_usage_perc")
        if None not in counts:
            share = float(usage) if isinstance(usage, int | float) and 0 <= usage <= 1 else None
            return sum(count or 0 for count in counts), share
    count = _count(_json(body).get("server_load"))
    return None if count is None else (count, None)


def _count(value: Any) -> int | None:
    return int(value) if isinstance(value, int | float) and 0 <= value < 1 << 31 else None


def _json(text: bytes) -> dict[str, Any]:
    try:
        found = msgspec.json.decode(text)
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return {}
    return found if isinstance(found, dict) else {}


def _sentence(status: int, body: bytes) -> str:
    """What a server says against being asked."""
    error = _json(body).get("error")
    text = error.get("message") if isinstance(error, dict) else None
    said = f": {' '.join(text.split())[:200]}" if isinstance(text, str) and text.strip() else ""
    return f"/health answers {status}{said}"
