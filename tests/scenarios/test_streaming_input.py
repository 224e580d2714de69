"""Streaming input with a real engine process: the tokens of plain requests, blocks kept, an engine that dies."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import pytest

from frame import AsyncEngineArgs, AsyncLLM, RequestOutputKind, SamplingParams, StreamingInput
from frame.testing.checkpoints import make_checkpoint

PIECES = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [14, 15], [16] * 20, [17, 18, 19]]
GREEDY = SamplingParams(temperature=0, max_tokens=7, ignore_eos=True, detokenize=False)


def engine_process() -> int:
    """The number of the engine's process."""
    listed = subprocess.run(
        ["ps", "-o", "pid=,args=", "--ppid", str(os.getpid())], capture_output=True, text=True, check=False
    ).stdout
    found = [int(line.split()[0]) for line in listed.splitlines() if "frame-engine" in line or "frame engine" in line]
    return max(found)


async def plain(llm, name, ids, params=GREEDY):
    """The whole output of a request of its own."""
    async for output in llm.generate({"prompt_token_ids": ids}, params, name):
        last = output
    return list(last.outputs[0].token_ids)


async def check(llm, name, params=GREEDY, between=None):
    """Runs a session; each answer is that to a plain request. Returns how many tokens of each prompt were kept."""
    told, prompts, answers, cached = 0, [], [], []

    async def pieces():
        for place, ids in enumerate(PIECES):
            while len(answers) < place:
                await asyncio.sleep(0.01)
            if between is not None and place:
                await between(place)
            yield StreamingInput({"prompt_token_ids": ids}, params if place % 2 else None)

    async for output in llm.generate(pieces(), params, name):
        completion = output.outputs[0]
        if completion.finish_reason and len(answers) < len(PIECES):
            prompts.append(list(output.prompt_token_ids))
            answers.append(list(completion.token_ids)[told:])
            cached.append(output.num_cached_tokens)
            told = len(completion.token_ids)
    assert output.finished
    context = []
    for ids, prompt, answer in zip(PIECES, prompts, answers, strict=True):
        assert prompt == [*context, *ids]
        assert answer == await plain(llm, f"{name}-{len(prompt)}", prompt, params)
        context = [*prompt, *answer[:-1]]
    return cached, [len(one) for one in prompts]


async def check_deltas(llm):
    """With deltas each token comes once, only the newest ones are computed, and the end is told with the last."""
    delta = SamplingParams(
        temperature=0, max_tokens=4, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )

    async def pieces():
        for ids in PIECES:
            yield ids

    outputs = [one async for one in llm.generate(pieces(), delta, "deltas")]
    assert [one.finished for one in outputs] == [False] * (len(outputs) - 1) + [True]
    assert sum(len(one.outputs[0].token_ids) for one in outputs) == 4 * len(PIECES)
    assert outputs[-1].num_cached_tokens == 9 + 2 + 20 + 3 * 3
    assert (await llm.stats()).kv_usage == 0.0


def with_engine(folder, work):
    """Runs `work(llm)` with an engine process of a tiny model, which caches no prefix."""
    make_checkpoint(folder, "llama")

    async def main():
        llm = AsyncLLM.from_engine_args(
            AsyncEngineArgs(
                model=str(folder), skip_tokenizer_init=True, max_model_len=128, dtype="float32", enforce_eager=True,
                enable_prefix_caching=False,
            )
        )  # fmt: skip
        try:
            await work(llm)
        finally:
            llm.shutdown()

    asyncio.run(main())


def test_answers_are_those_of_plain_requests_and_nothing_is_computed_twice(tmp_path):
    async def work(llm):
        cached, lengths = await check(llm, "kept")
        assert cached == [0, 15, 23, 49]  # all that was there: the pieces and six tokens of each answer
        assert cached[1:] == [before + GREEDY.max_tokens - 1 for before in lengths[:-1]]
        random = SamplingParams(
            temperature=0.8, seed=3, max_tokens=5, ignore_eos=True, detokenize=False, repetition_penalty=1.2,
            presence_penalty=0.5,
        )  # fmt: skip
        await asyncio.gather(*(check(llm, f"beside-{place}", random) for place in range(2)))
        await check_deltas(llm)
        stats = await llm.stats()
        assert (stats.running, stats.waiting, stats.kv_usage) == (0, 0, 0.0)

    with_engine(tmp_path, work)


@pytest.mark.slow
def test_a_session_goes_on_with_the_next_engine(tmp_path):
    async def work(llm):
        async def kill(place):
            if place == 2:
                os.kill(engine_process(), signal.SIGKILL)

        cached, _ = await check(llm, "replaced", between=kill)
        assert cached[2] == 0  # read again
        assert cached[3] > 0

    with_engine(tmp_path, work)
