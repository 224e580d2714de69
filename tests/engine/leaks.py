"""Whether an engine gives back what requests took: mixed requests, of which many are aborted, then everything counted.

Used on a CPU with few requests (tests/engine/test_leaks.py) and on a GPU with a thousand (tests/gpu/test_leaks.py).
"""

from __future__ import annotations

import gc
import random
from dataclasses import dataclass
from typing import Any

import torch

from frame import EngineArgs, LLMEngine, SamplingParams

#: Tables of collaborators grow in steps; a request's own tensors would show a thousand times.
SLACK_BYTES = 1 << 20


@dataclass(frozen=True)
class Held:
    """What an idle engine has: free blocks and slots, and bytes of the device's memory that tensors hold."""

    blocks: int
    slots: int
    device_bytes: int


def held(engine: LLMEngine) -> Held:
    scheduler: Any = engine.core.scheduler
    while engine.core.has_unfinished():  # steps in flight whose requests are gone
        engine.step()
    gc.collect()
    taken = 0
    if torch.cuda.is_available():
        torch.cuda.synchronize()
        taken = torch.cuda.memory_allocated()
    return Held(scheduler._kv.pool.num_free, scheduler._batch.slots.num_free, taken)


def params_of(draw: random.Random, vocab_size: int) -> SamplingParams:
    """Each feature that keeps something for a request."""
    features: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 1.0, "seed": draw.randrange(1 << 30), "top_k": 20, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.7, "logprobs": 3, "presence_penalty": 0.5, "repetition_penalty": 1.2},
        {"temperature": 0.0, "prompt_logprobs": 2},
        {"temperature": 1.0, "n": 2},
        {"temperature": 1.0, "logit_bias": {draw.randrange(vocab_size): 2.0}, "min_tokens": 4},
        {"temperature": 0.0, "allowed_token_ids": draw.sample(range(vocab_size), 7)},
        {"temperature": 0.0, "deterministic": True},
    ]
    chosen = draw.choice(features)
    return SamplingParams(max_tokens=draw.randint(4, 40), ignore_eos=True, detokenize=False, **chosen)


def drive(engine: LLMEngine, count: int, draw: random.Random, *, vocab_size: int, longest: int, tag: str) -> int:
    """Adds `count` requests while others run, a third of which share a beginning; aborts about a third, at any time."""
    shared = [draw.randrange(vocab_size) for _ in range(longest // 2)]
    open_ids: list[str] = []
    aborted = added = 0
    while added < count or engine.has_unfinished_requests():
        for _ in range(draw.randint(0, 6) if added < count else 0):
            start = shared if draw.random() < 0.33 else []
            prompt = start + [draw.randrange(vocab_size) for _ in range(draw.randint(1, longest // 2))]
            name = f"{tag}-{added}"
            engine.add_request(name, {"prompt_token_ids": prompt}, params_of(draw, vocab_size))
            open_ids.append(name)
            added += 1
        if open_ids and draw.random() < 0.35:
            engine.abort_request(open_ids.pop(draw.randrange(len(open_ids))))
            aborted += 1
        for output in engine.step():
            if output.finished and output.request_id in open_ids:
                open_ids.remove(output.request_id)
    return aborted


def check_nothing_is_kept(folder: str, count: int, *, vocab_size: int, longest: int, **settings: Any) -> None:
    """The engine is warm after a tenth of the requests; what it has then, it must have after all of them.

    Steps of some size may be met late and be recorded then, which takes memory once: what grows by the requests grows
    again with as many more.
    """
    draw = random.Random(11)
    arguments = EngineArgs(model=folder, skip_tokenizer_init=True, **settings)
    engine = LLMEngine.from_engine_args(arguments)
    try:
        fresh = held(engine)
        sizes = {"vocab_size": vocab_size, "longest": longest}
        drive(engine, max(8, count // 10), draw, **sizes, tag="warm")
        before = held(engine)
        aborted = drive(engine, count, draw, **sizes, tag="real")
        after = held(engine)
        assert aborted > count // 10
        if after.device_bytes > before.device_bytes + SLACK_BYTES:
            before = after
            drive(engine, count, draw, **sizes, tag="more")
            after = held(engine)
        assert (fresh.blocks, fresh.slots) == (before.blocks, before.slots) == (after.blocks, after.slots)
        grown = after.device_bytes - before.device_bytes
        assert grown <= SLACK_BYTES, f"{before} before, {after} after {count} requests"
    finally:
        engine.close()
