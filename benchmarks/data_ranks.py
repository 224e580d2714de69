"""Tokens a second of one engine, and of several that share a front: `AsyncLLM` on model shapes with random weights.

    python -m benchmarks.data_ranks --shape llama-8b --engines 1,2 --requests 512    # 512 requests for each engine
    python -m benchmarks.data_ranks --shape qwen3-30b-a3b --engines 2 --extra '{"enable_expert_parallel": true}'

Token ids in, token ids out, every token asked for is produced; all requests come at once, and each is answered in one
piece. Each run is timed twice and the better one is kept.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import tempfile
import time
from pathlib import Path
from typing import Any

from frame import AsyncLLM, SamplingParams
from frame.interfaces import RequestOutputKind
from frame.settings import FrameConfig

from . import offline_gpu


def requests(run: offline_gpu.Run, vocab_size: int, seed: int) -> list[tuple[list[int], SamplingParams]]:
    """Prompts of random ids and how each is continued."""
    draw = random.Random(seed)
    return [
        (
            [draw.randrange(100, vocab_size - 1000) for _ in range(draw.randint(*run.tokens_in))],
            SamplingParams(
                temperature=0.6, max_tokens=draw.randint(*run.tokens_out), ignore_eos=True, detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            ),
        )
        for _ in range(run.requests)
    ]  # fmt: skip


async def timed(llm: AsyncLLM, batch: list[tuple[list[int], SamplingParams]], name: str) -> float:
    """Seconds from the first request to the end of the last one."""

    async def one(index: int, ids: list[int], params: SamplingParams) -> int:
        count = 0
        async for output in llm.generate({"prompt_token_ids": ids}, params, f"{name}-{index}"):
            count = len(output.outputs[0].token_ids)
        return count

    start = time.perf_counter()
    counts = await asyncio.gather(*(one(index, *given) for index, given in enumerate(batch)))
    seconds = time.perf_counter() - start
    wanted = sum(params.max_tokens or 0 for _, params in batch)
    if sum(counts) != wanted:
        raise RuntimeError(f"{sum(counts)} tokens came, {wanted} were asked for")
    return seconds


def measure(shape: str, folder: str, engines: int, per_engine: int, extra: dict[str, Any]) -> dict[str, Any]:
    """Figures of so many engines, with `per_engine` requests for each; `folder` is the model's."""
    vocab_size = int(offline_gpu.MODELS[shape][0]["vocab_size"])
    low_high = offline_gpu.LLAMA_MIXED
    run = offline_gpu.Run(per_engine * engines, low_high.tokens_in, low_high.tokens_out)
    start = time.perf_counter()
    llm = AsyncLLM.from_config(
        FrameConfig.from_flat(
            model=folder, load_format="dummy", skip_tokenizer_init=True, dtype="bfloat16", max_model_len=16384,
            data_parallel_size=engines, **extra,
        )
    )  # fmt: skip
    started = time.perf_counter() - start

    async def both() -> list[tuple[float, int]]:
        await timed(llm, requests(offline_gpu.Run(4 * engines, (64, 64), (16, 16)), vocab_size, 9), "warm")
        found = []
        for repeat in range(2):
            batch = requests(run, vocab_size, repeat)
            seconds = await timed(llm, batch, f"r{repeat}")
            found.append((seconds, sum(params.max_tokens or 0 for _, params in batch)))
        stats = await llm.stats()
        print([one.generated_tokens for one in stats.ranks or [stats]], "tokens by engine", flush=True)
        llm.shutdown()
        return found

    seconds, tokens = max(asyncio.run(both()), key=lambda one: one[1] / one[0])
    return {
        "engines": engines, "run": str(run), "start_seconds": started, "seconds": seconds,
        "tokens_per_second": tokens / seconds,
    }  # fmt: skip


def main() -> None:
    """Prints a line for each number of engines, and the ratio to the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=list(offline_gpu.MODELS), default="llama-8b")
    parser.add_argument("--engines", default="1,2", help="numbers of engines, by commas")
    parser.add_argument("--requests", type=int, default=512, help="for each engine")
    parser.add_argument("--extra", type=json.loads, default={}, help="further settings, as JSON")
    options = parser.parse_args()
    first = 0.0
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(offline_gpu.MODELS[options.shape][0]))
        for engines in map(int, options.engines.split(",")):
            found = measure(options.shape, folder, engines, options.requests, options.extra)
            first = first or found["tokens_per_second"]
            ratio = found["tokens_per_second"] / first
            print(json.dumps({**found, "ratio": ratio}), flush=True)


if __name__ == "__main__":
    main()
