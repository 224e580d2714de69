"""Sends requests to a server at the times of a schedule."""

from __future__ import annotations

import asyncio
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass

from frame.settings import ConfigError

from .arrivals import arrival_times
from .client import Target, http_client, send
from .record import BenchRequest, MeasuredRequest

_RETRY_SECONDS = 0.5
_ASK_SECONDS = 10.0


@dataclass(frozen=True)
class Load:
    """What to send and when. `timeout` is the longest silence of an answer in seconds."""

    requests: Sequence[BenchRequest]
    rate: float
    burstiness: float = 1.0
    max_concurrency: int | None = None
    seed: int = 0
    num_warmups: int = 0
    timeout: float | None = None


@dataclass(frozen=True)
class Run:
    """Records in the order of the requests, the seconds from the first sent to the last answered, and `client_cpu`: the
    share of one processor that this client used. Near 1 the client, not the server, limits the figures.
    """

    records: list[MeasuredRequest]
    seconds: float
    client_cpu: float


async def run_load(target: Target, load: Load, tick: Callable[[], object]) -> Run:
    """Sends everything; `tick` is called after each answer. Raises `ConfigError` when a warm-up request fails."""
    limit = asyncio.Semaphore(load.max_concurrency) if load.max_concurrency else None
    async with http_client(target.headers, load.timeout) as client:

        async def one(request: BenchRequest) -> MeasuredRequest:
            room: AbstractAsyncContextManager[object] = limit if limit is not None else nullcontext()
            async with room:
                return await send(client, target, request)

        if load.num_warmups:
            chosen = [load.requests[index % len(load.requests)] for index in range(load.num_warmups)]
            for record in await asyncio.gather(*map(one, chosen)):
                if record.error:
                    raise ConfigError(f"a warm-up request failed: {record.error}")
        times = arrival_times(len(load.requests), load.rate, load.burstiness, random.Random(load.seed))
        start, cpu = time.perf_counter(), time.process_time()

        async def ticked(request: BenchRequest) -> MeasuredRequest:
            record = await one(request)
            tick()
            return record

        tasks = []
        for request, due in zip(load.requests, times, strict=True):
            wait = start + due - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            tasks.append(asyncio.create_task(ticked(request)))
        records = await asyncio.gather(*tasks)
        seconds = time.perf_counter() - start
        return Run(records, seconds, (time.process_time() - cpu) / seconds)


async def wait_ready(base_url: str, headers: Mapping[str, str], seconds: float) -> None:
    """Returns once something answers at `base_url`; says so when it waits; `ConfigError` after `seconds`."""
    end, waits = time.perf_counter() + seconds, False
    async with http_client(headers, _ASK_SECONDS) as client:
        import httpx  # http_client has raised an error where it is missing

        while True:
            try:
                response = await client.get(f"{base_url}/v1/models")
                if response.status_code not in (502, 503):
                    return
                reason = f"HTTP {response.status_code}"
            except (httpx.HTTPError, httpx.InvalidURL) as error:
                reason = str(error) or type(error).__name__
            if time.perf_counter() >= end:
                raise ConfigError(f"no server is ready at {base_url} after {seconds:g} s: {reason}")
            if not waits:
                print(f"waiting up to {seconds:g} s for a server at {base_url}: {reason}", file=sys.stderr, flush=True)
            waits = True
            await asyncio.sleep(_RETRY_SECONDS)


async def ask_model(base_url: str, headers: Mapping[str, str], name: str = "") -> tuple[str, int | None]:
    """`name`, or the first model that the server lists, and how many tokens it takes where the server says so.

    Raises `ConfigError` where there is no name.
    """
    async with http_client(headers, _ASK_SECONDS) as client:
        response = await client.get(f"{base_url}/v1/models")
    try:
        cards = [card for card in response.json()["data"] if card["id"] == name or not name]
    except (ValueError, LookupError, TypeError):
        cards = []
    if not cards and not name:
        reason = f"{base_url}/v1/models answers HTTP {response.status_code}"
        raise ConfigError(f"{reason} and names no model; give one with --model, and a key in OPENAI_API_KEY")
    longest = cards[0].get("max_model_len") if cards else None
    return name or str(cards[0]["id"]), longest if isinstance(longest, int) else None
