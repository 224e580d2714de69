"""A server's engine of two workers, one of which is killed: another takes its place, and streams go on as they were."""

import asyncio
import os
import signal
import time
from pathlib import Path

from frame import AsyncLLM, EngineArgs, SamplingParams
from frame.testing.checkpoints import make_checkpoint


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
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=60, ignore_eos=True, detokenize=False)
    ids: list[int] = []
    async for output in llm.generate({"prompt_token_ids": [5, 6, 7]}, params, request_id=name):
        assert list(output.outputs[0].token_ids)[: len(ids)] == ids, "a stream took tokens back"
        ids = list(output.outputs[0].token_ids)
        if seen is not None and len(ids) >= 5:
            seen.set()
    return ids


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
            assert time.monotonic() - began < 20
            assert not set(before) & set(workers())
        finally:
            llm.shutdown()

    asyncio.run(run())
