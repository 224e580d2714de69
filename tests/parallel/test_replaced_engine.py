"""A server's engine of two workers, one of which is killed: another takes its place, and streams go on as they were."""

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from frame import AsyncLLM, EngineArgs, SamplingParams
from frame.settings import FrameConfig
from frame.testing.checkpoints import make_checkpoint
from tests.parallel.stalling import STALLS, offer


def workers() -> list[int]:
    """Worker processes of engines that this process started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = stat.read_bytes().split(b"\0")
            parent = int((stat.parent / "stat").read_text().rpartition(")")[2].split()[1])
            above = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            continue
        if words[3:5] == [b"frame", b"worker"] and above == os.getpid():
            found.append(int(stat.parent.name))
    return sorted(found)


async def stream(llm: AsyncLLM, name: str, seen: asyncio.Event | None = None) -> list[int]:
    """The tokens of a request; `seen` is set when some have come."""
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, detokenize=False)
    ids: list[int] = []
    async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, request_id=name):
        assert list(output.outputs[0].token_ids)[: len(ids)] == ids, "a stream took tokens back"
        ids = list(output.outputs[0].token_ids)
        if seen is not None and len(ids) >= 5:
            seen.set()
    return ids


@pytest.mark.matrix
def test_streams_go_on_with_the_same_text(tmp_path):
    make_checkpoint(tmp_path, "llama")
    arguments = {"tensor_parallel_size": 2, "deterministic": True, "num_threads": 1, "dtype": "float32"}

    async def run() -> None:
        llm = AsyncLLM.from_engine_args(
            EngineArgs(model=str(tmp_path), skip_tokenizer_init=True, max_model_len=128, **arguments)
        )
        try:
            expected = await stream(llm, "alone")
            seen = asyncio.Event()
            streams = [asyncio.create_task(stream(llm, name, seen)) for name in ("a", "b")]
            await seen.wait()
            before = workers()
            assert len(before) == 2
            began = time.monotonic()
            os.kill(before[1], signal.SIGKILL)
            assert await asyncio.gather(*streams) == [expected, expected]
            assert time.monotonic() - began < 100
            assert not set(before) & set(workers())
        finally:
            llm.shutdown()

    asyncio.run(run())


class Scene:
    """An engine with two workers and two streams, and when one of the workers is killed."""

    def __init__(self, llm: AsyncLLM, expected: list[int]) -> None:
        self.llm, self.expected, self.killed_at = llm, expected, 0.0
        self.seen, self.streams = asyncio.Event(), list[asyncio.Task[list[int]]]()

    def begin(self) -> None:
        self.streams = [asyncio.create_task(stream(self.llm, name, self.seen)) for name in ("a", "b")]

    def kill(self, rank: int) -> None:
        self.killed_at = time.monotonic()
        os.kill(workers()[rank], signal.SIGKILL)

    async def in_decodes(self, rank: int) -> None:
        self.begin()
        await self.seen.wait()
        self.kill(rank)

    async def in_a_collective_of_a_prompt(self, rank: int) -> None:
        """The other rank never comes to the collective in which it waits."""
        await self.llm.collective_rpc("stall", kwargs={"rank": 1 - rank})
        self.begin()
        await asyncio.sleep(0.5)
        assert not self.seen.is_set()
        self.kill(rank)

    async def in_a_collective_of_decodes(self, rank: int) -> None:
        self.begin()
        await self.seen.wait()
        await self.llm.collective_rpc("stall", kwargs={"rank": 1 - rank})
        await asyncio.sleep(0.5)
        self.kill(rank)

    async def while_the_next_one_loads(self, rank: int) -> None:
        self.begin()
        await self.seen.wait()
        before = workers()
        os.kill(before[0], signal.SIGKILL)
        while not (loading := sorted(set(workers()) - set(before))) or len(loading) < 2:
            await asyncio.sleep(0.001)
        self.killed_at = time.monotonic()
        os.kill(loading[rank], signal.SIGKILL)


@pytest.mark.matrix
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_whichever_worker_is_killed_whenever(rank, tmp_path, monkeypatch):
    """Without a standby, so that the next engine's workers load after the death."""
    offer(monkeypatch)
    make_checkpoint(tmp_path, "llama")
    arguments = {"tensor_parallel_size": 2, "deterministic": True, "num_threads": 1, "dtype": "float32", **STALLS}

    async def run() -> None:
        values = {"model": str(tmp_path), "skip_tokenizer_init": True, "max_model_len": 128, "standby_engine": False}
        llm = await asyncio.to_thread(AsyncLLM.from_config, FrameConfig.from_flat(**values, **arguments))
        try:
            expected = await stream(llm, "alone")
            moments: list[Callable[[Scene, int], Awaitable[None]]] = [
                Scene.in_decodes, Scene.in_a_collective_of_a_prompt, Scene.in_a_collective_of_decodes,
                Scene.while_the_next_one_loads,
            ]  # fmt: skip
            for moment in moments:
                scene, before = Scene(llm, expected), workers()
                await moment(scene, rank)
                assert await asyncio.gather(*scene.streams) == [expected, expected], moment.__name__
                seconds = time.monotonic() - scene.killed_at
                print(f"{moment.__name__}, rank {rank}: {seconds:.1f} s to the streams' ends")
                assert seconds < 100  # most of which a busy machine takes to import torch
                assert not set(before) & set(workers())
        finally:
            llm.shutdown()

    asyncio.run(run())
