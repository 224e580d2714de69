"""KV that travels: from GPU to GPU, and from and to host memory, beside the same work without it.

    python benchmarks/transfers.py pair --json $OUT/pair.json    # two GPUs: prefill on the second, decode on the first
    python benchmarks/transfers.py pair --connector push --json $OUT/push.json    # the same, sent while it is computed
    python benchmarks/transfers.py pair --connector push --no-direct --json $OUT/push-host.json    # by host memory
    python benchmarks/transfers.py tier --json $OUT/tier.json    # one GPU and --kv-offloading-size
    python benchmarks/transfers.py pair --shape tiny --platform cpu --prompt 64 --short 32 --requests 6 --wait 0.1
    python benchmarks/transfers.py pair --requests 0 --long 12 --json $OUT/long.json    # long prompts alone
    python benchmarks/transfers.py pair --engine vllm --json $OUT/vllm.json    # the peer and its connector

The shape is that of Llama 8B with random weights; nothing is downloaded. `pair` tells the bytes a second of one long
prompt, the seconds that it adds to the first decoded token, and the rate and gaps between tokens while many prompts
travel, beside a decode engine that computes nothing else, and beside two engines that do both. `tier` tells what a long
prefix costs from host memory and computed, what stores cost a rate (the better of two runs), and what they cost the
gaps between tokens of requests that come one by one. vLLM tells no bytes and seconds of one load: for it the long
prompt's `added_seconds` are what can be compared.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import socket
import tempfile
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from long_prompt import SHAPES as SMALL_SHAPES
from offline_gpu import LLAMA

SHAPES = {"llama-8b": LLAMA, "llama-1b": SMALL_SHAPES["llama-1b"], "tiny": SMALL_SHAPES["tiny"]}
ASKS = {"do_remote_decode": True, "do_remote_prefill": False}


def library(name: str) -> tuple[Any, Any, Any]:
    """`AsyncEngineArgs`, `AsyncLLM` and `SamplingParams` of frame or of vLLM, whose names are the same."""
    if name == "vllm":
        from vllm import AsyncEngineArgs as PeerArgs, SamplingParams as PeerParams
        from vllm.v1.engine.async_llm import AsyncLLM as PeerLLM

        return PeerArgs, PeerLLM, PeerParams
    from frame import AsyncEngineArgs, AsyncLLM, SamplingParams

    return AsyncEngineArgs, AsyncLLM, SamplingParams


@contextmanager
def environment(**values: str) -> Iterator[None]:
    """Sets variables for the processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


class Engine:
    """An engine process, and what its requests took; requests have ids of their own.

    `device` numbers those that CUDA_VISIBLE_DEVICES names, or all.
    """

    def __init__(self, options: argparse.Namespace, device: int, **settings: Any) -> None:
        self._vocabulary = SHAPES[options.shape]["vocab_size"]
        self._count = 0
        self._is_peer = options.engine == "vllm"
        args, llm, self._params = library(options.engine)
        variables = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())} if self._is_peer else {}
        if options.platform != "cpu":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            given = visible.split(",") if visible else [str(number) for number in range(device + 1)]
            variables["CUDA_VISIBLE_DEVICES"] = given[device]
        if not self._is_peer:
            settings["platform"] = options.platform
        with environment(**variables), tempfile.TemporaryDirectory() as folder:
            (Path(folder) / "config.json").write_text(json.dumps(SHAPES[options.shape]))
            self._llm = llm.from_engine_args(
                args(
                    model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", seed=0,
                    max_model_len=options.prompt + 1024, **settings,
                )
            )  # fmt: skip

    def prompt(self, tokens: int, seed: int) -> dict[str, Any]:
        """A random prompt."""
        draw = random.Random(seed)
        return {"prompt_token_ids": [draw.randrange(100, self._vocabulary - 100) for _ in range(tokens)]}

    async def ask(self, prompt: Any, tokens: int, params: dict[str, Any] | None = None) -> tuple[list[float], Any]:
        """When the request began and each output came, and the parameters that it gave back."""
        self._count += 1
        asks = {"kv_transfer_params": params} if params is not None else None
        wanted = self._params(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, extra_args=asks)
        times, made, given = [time.perf_counter()], 0, None
        async for output in self._llm.generate(prompt, wanted, f"r{self._count}"):
            count = len(output.outputs[0].token_ids)
            times += [time.perf_counter()] * (count - made)
            made, given = count, getattr(output, "kv_transfer_params", None) or given
        if made != tokens:
            raise RuntimeError(f"{made} tokens came back, {tokens} were asked for")
        return times, given

    async def counters(self) -> dict[str, float]:
        """What the connector has counted so far; nothing of vLLM's."""
        if self._is_peer:
            return {}
        return dict((await self._llm.stats()).connector_counters)

    async def forget(self) -> None:
        """Empties the device's prefix cache, but no tier."""
        while not await self._llm.reset_prefix_cache():
            await asyncio.sleep(0.01)

    def close(self) -> None:
        """Ends the process."""
        self._llm.shutdown()


@asynccontextmanager
async def engines(*made: Engine) -> AsyncIterator[tuple[Engine, ...]]:
    """Closes them in the end."""
    try:
        yield made
    finally:
        for one in made:
            one.close()


def gaps_of(times: list[list[float]]) -> dict[str, float]:
    """Seconds between tokens of all streams."""
    gaps = np.concatenate([np.diff(one[1:]) for one in times])
    return {"itl_p50": float(np.median(gaps)), "itl_p99": float(np.quantile(gaps, 0.99))}


async def handed_over(prefill: Engine, decode: Engine, prompt: Any, tokens: int) -> tuple[list[float], float]:
    """A prompt that one engine computes and another continues: its times there, and when the first one was done."""
    first, params = await prefill.ask(prompt, 1, dict(ASKS))
    times, _ = await decode.ask(prompt, tokens, params)
    return times, first[-1]


async def many(options: argparse.Namespace, one: Any) -> tuple[float, list[list[float]]]:
    """All requests at once: seconds, and the times of each."""
    start = time.perf_counter()
    found = await asyncio.gather(*(one(number) for number in range(options.requests)))
    return time.perf_counter() - start, found


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
        return port


def connected(options: argparse.Namespace, secret: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Settings of an engine that gives blocks, and of one that takes them."""
    if options.engine == "vllm":
        from vllm.config import KVTransferConfig

        peer = {"kv_transfer_config": KVTransferConfig(kv_connector="NixlConnector", kv_role="kv_both")}
        return peer, peer
    name = options.connector
    given: dict[str, Any] = {"secret_file": secret, "direct": options.direct}
    taken = dict(given)
    if name == "push":
        port = free_port()
        given |= {"decode": f"127.0.0.1:{port}"}
        taken |= {"port": port, "buffer_bytes": options.buffer << 20, "device_bytes": options.buffer << 20}
    shared: dict[str, Any] = {"kv_connector": name}
    if name == "push" and options.platform != "cpu":
        shared["gpu_memory_utilization"] = 0.8  # what is taken beside the KV cache must be free
    return (
        {**shared, "kv_role": "producer", "plugin": {name: {**given, "max_held_share": 1.0}}},
        {**shared, "kv_role": "consumer", "plugin": {name: {**taken, "max_held_share": 1.0}}},
    )


async def pair(options: argparse.Namespace) -> dict[str, Any]:
    """Two engines of their own kind, then two that do both."""
    figures: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        secret = Path(folder) / "secret"
        secret.write_text(os.urandom(32).hex())
        kinds = connected(options, str(secret))
        producer = Engine(options, 1, max_num_batched_tokens=options.chunk, **kinds[0])
        consumer = Engine(options, 0, **kinds[1])
        async with engines(producer, consumer) as (prefill, decode):
            figures |= await one_prompt(options, prefill, decode)
            if options.requests == 0:
                return figures
            figures |= await many_prompts(options, prefill, decode)
    async with engines(Engine(options, 0), Engine(options, 1)) as both:
        await asyncio.gather(*(one.ask(one.prompt(options.short, 10**6), 32) for one in both))

        async def plain(number: int) -> list[float]:
            await asyncio.sleep(number / figures["prompts that travel"]["requests_per_second"])
            engine = both[number % 2]
            return (await engine.ask(engine.prompt(options.short, number), options.tokens))[0]

        seconds, times = await many(options, plain)
        figures["two that do both"] = {"requests_per_second": options.requests / seconds, **gaps_of(times)}
    return figures


def change(before: dict[str, float], after: dict[str, float], name: str) -> float:
    """By how much a counter has grown."""
    return after.get(name, 0.0) - before.get(name, 0.0)


async def one_prompt(options: argparse.Namespace, prefill: Engine, decode: Engine) -> dict[str, Any]:
    """The bandwidth of one long prompt, and what its way adds to the first decoded token.

    `cached_seconds` are what a prompt of one token more adds whose other blocks the decode engine has: the client's
    part, the way to the engine, and what a first step takes beyond a later one. They are no part of the transfer.
    """
    await handed_over(prefill, decode, prefill.prompt(options.prompt, 1), 4)  # kernels, handshake
    found = []
    for seed in range(2, 2 + options.long):
        before, given = await decode.counters(), await prefill.counters()
        prompt = prefill.prompt(options.prompt, seed)
        times, done = await handed_over(prefill, decode, prompt, 32)
        cached, _ = await decode.ask({"prompt_token_ids": [*prompt["prompt_token_ids"], 100]}, 32)
        await prefill.ask(prefill.prompt(options.short, 10**5 + seed), 1)  # an idle engine tells what it sent in a step
        after, sent = await decode.counters(), await prefill.counters()
        moved, seconds = (
            change(before, after, f"{options.connector}_{name}") for name in ("loaded_bytes", "load_seconds")
        )
        step = float(np.median(np.diff(times[2:])))
        one = {"added_seconds": times[1] - done - step, "step_seconds": step,
               "cached_seconds": cached[1] - cached[0] - step}  # fmt: skip
        if options.engine == "frame":
            one |= {"bytes": moved, "seconds": seconds, "rate": moved / max(seconds, 1e-9)}
        if options.engine == "frame" and options.connector == "nixl":
            one["copy_seconds"] = change(before, after, "nixl_direct_seconds")
        elif options.engine == "frame":
            written, spent = (change(given, sent, f"push_direct_{name}") for name in ("bytes", "seconds"))
            one |= {"written_bytes": written, "written_seconds": spent, "write_rate": written / max(spent, 1e-9)}
        found.append(one)
    medians = {name: float(np.median([one[name] for one in found])) for name in found[0]}
    best = max(found, key=lambda one: one.get("rate", -one["added_seconds"]))
    return {"one prompt": best, "medians": medians, "all": found}


async def many_prompts(options: argparse.Namespace, prefill: Engine, decode: Engine) -> dict[str, Any]:
    """Prompts alone, prompts that travel, and the same decodes where nothing travels."""
    figures: dict[str, Any] = {}

    async def alone(number: int) -> list[float]:
        return (await prefill.ask(prefill.prompt(options.short, 1000 + number), 1))[0]

    seconds, _ = await many(options, alone)
    figures["prompts only"] = {"requests_per_second": options.requests / seconds}
    place = asyncio.Semaphore(options.at_once)

    async def travels(number: int) -> list[float]:
        prompt = prefill.prompt(options.short, 2000 + number)
        async with place:
            _, params = await prefill.ask(prompt, 1, dict(ASKS))
        return (await decode.ask(prompt, options.tokens, params))[0]

    before = await decode.counters()
    started = time.perf_counter()
    seconds, times = await many(options, travels)
    after = await decode.counters()
    moved = {name: value - before.get(name, 0.0) for name, value in after.items()}
    spent = max(one[1] for one in times) - started  # until the last prompt is continued: then decodes alone are left
    rates = {"requests_per_second": options.requests / seconds, "prompts_per_second": options.requests / spent}
    figures["prompts that travel"] = {**rates, **gaps_of(times), **moved}

    async def cached(number: int) -> list[float]:
        await asyncio.sleep(number * seconds / options.requests)  # as often as they came before
        return (await decode.ask(decode.prompt(options.short, 2000 + number), options.tokens))[0]

    _, times = await many(options, cached)
    figures["decode without transfers"] = gaps_of(times)
    return figures


async def tier(options: argparse.Namespace) -> dict[str, Any]:
    """One engine without a tier, then one with it."""
    figures: dict[str, Any] = {}
    for name, settings in (("off", {}), ("on", {"kv_offloading_size": options.gib})):
        async with engines(Engine(options, 0, **settings)) as (engine,):
            await engine.ask(engine.prompt(options.prompt, 1), 4)
            if settings:
                figures["prefix"] = await prefix(options, engine)
            prompts = itertools.count(3000)  # none is asked twice

            async def one(number: int, wait: float, engine: Engine = engine, prompts: Any = prompts) -> list[float]:
                await asyncio.sleep(number * wait)
                return (await engine.ask(engine.prompt(options.short, next(prompts)), options.tokens))[0]

            await asyncio.gather(*(one(number, 0.0) for number in range(16)))  # kernels and graphs
            at_once = [await many(options, lambda number: one(number, 0.0)) for _ in range(2)]
            _, times = await many(options, lambda number: one(number, options.wait))
            figures[name] = {"seconds": min(seconds for seconds, _ in at_once), **gaps_of(times)}
            figures[name]["all seconds"] = [seconds for seconds, _ in at_once]
    figures["share"] = figures["off"]["seconds"] / figures["on"]["seconds"]
    figures["p99 on over off"] = figures["on"]["itl_p99"] / figures["off"]["itl_p99"]
    return figures


async def prefix(options: argparse.Namespace, engine: Engine) -> dict[str, Any]:
    """A long prompt computed, and again from host memory."""
    prompt = engine.prompt(options.prompt, 2)
    computed, _ = await engine.ask(prompt, 2)
    await asyncio.sleep(1)  # its blocks are stored beside the steps
    found = []
    for _ in range(3):
        await engine.forget()
        before = await engine.counters()
        times, _ = await engine.ask(prompt, 2)
        after = await engine.counters()
        moved, seconds = (
            after.get(f"offload_{name}", 0.0) - before.get(f"offload_{name}", 0.0)
            for name in ("load_bytes", "load_seconds")
        )
        found.append(
            {"first_token": times[1] - times[0], "bytes": moved, "seconds": seconds, "rate": moved / max(seconds, 1e-9)}
        )
    best = min(found, key=lambda one: one["first_token"])
    return {"computed": computed[1] - computed[0], **best, "share": best["first_token"] / (computed[1] - computed[0])}


def main() -> None:
    """Reads the arguments and measures."""
    parser = argparse.ArgumentParser(description="KV that travels, beside the same work without it.")
    parser.add_argument("what", choices=["pair", "tier"])
    parser.add_argument("--engine", default="frame", choices=["frame", "vllm"], help="Whose engines `pair` runs.")
    parser.add_argument("--connector", default="nixl", choices=["nixl", "push"], help="What connects a pair.")
    parser.add_argument("--direct", default=True, action=argparse.BooleanOptionalAction, help="Map the other GPU.")
    parser.add_argument("--buffer", type=int, default=4096, help="MiB in which push keeps what nobody claimed yet.")
    parser.add_argument("--shape", default="llama-8b", choices=SHAPES)
    parser.add_argument("--platform", default="auto")
    parser.add_argument("--prompt", type=int, default=16384, help="Tokens of the long prompt.")
    parser.add_argument("--long", type=int, default=3, help="How many long prompts travel, one after the other.")
    parser.add_argument("--short", type=int, default=2048, help="Tokens of each of many prompts.")
    parser.add_argument("--tokens", type=int, default=200, help="Tokens that follow each of them.")
    parser.add_argument("--requests", type=int, default=128, help="How many there are; 0: `pair` ends before.")
    parser.add_argument("--at-once", type=int, default=8, help="Prompts that the prefill engine has at a time.")
    parser.add_argument(
        "--wait", type=float, default=0.1, help="Seconds between requests of `tier` that come one by one."
    )
    parser.add_argument("--chunk", type=int, default=8192, help="Tokens of a step of the prefill engine.")
    parser.add_argument("--gib", type=float, default=32.0, help="Host memory of the tier.")
    parser.add_argument("--json", type=Path, help="Where the figures are written.")
    options = parser.parse_args()
    if options.engine == "vllm" and options.what == "tier":
        parser.error("--engine vllm runs `pair` alone")
    figures = asyncio.run(pair(options) if options.what == "pair" else tier(options))
    print(json.dumps(figures, indent=1))
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    main()
