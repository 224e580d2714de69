"""Engines with a model publish what their caches hold, and the example of the docs follows them. Real processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq

from frame import LLM, SamplingParams
from frame.kv_events.wire import decode_batch
from tests.free_ports import free_ports
from tests.kv_events.listening import opened, replayed
from tests.server.running import REAL, Running, server, until

EXAMPLE = Path(__file__).parents[2] / "examples" / "kv_events.py"
PROMPTS = ["Once upon a time there was a very small house, and in that house lived a mouse", "A" * 60]


def held(batches: list[tuple[int, bytes]]) -> set[tuple[int, Any]]:
    """(group, hash) of the blocks that can be found behind all batches."""
    blocks: set[tuple[int, Any]] = set()
    for _, payload in batches:
        for event in decode_batch(payload)[1]:
            named = {(event.get("group_idx"), name) for name in event.get("block_hashes", ())}
            if event["type"] == "BlockStored":
                assert len(event["token_ids"]) == len(event["block_hashes"]) * event["block_size"]
                assert not blocks & named
                blocks |= named
            elif event["type"] == "BlockRemoved":
                assert named <= blocks
                blocks -= named
            else:
                blocks.clear()
    return blocks


@pytest.mark.parametrize("form", ["array", "map"])
def test_what_is_heard_is_what_the_cache_holds(form: str) -> None:
    first = free_ports(2)
    where, again = (f"tcp://127.0.0.1:{first + place}" for place in range(2))
    settings: dict[str, Any] = {"kv_events_format": form, "kv_events_hashes": "bytes", "num_gpu_blocks_override": 40}
    with (
        LLM(kv_events_endpoint=where, kv_events_replay_endpoint=again, disable_log_stats=False, **settings) as llm,
        opened(zmq.DEALER, again, RCVHWM=0) as dealer,
    ):
        pool = llm.llm_engine.core.scheduler._kv.pool
        for prompt in (*PROMPTS, *(f"{number} bottles of beer on the wall" * 4 for number in range(12))):
            llm.generate(prompt, SamplingParams(max_tokens=40, temperature=0), use_tqdm=False)
        publisher = llm.llm_engine.core.scheduler.events._publisher
        until(lambda: len(replayed(dealer, 0)) == publisher._next)
        batches = replayed(dealer, 0)
        assert [number for number, _ in batches] == list(range(len(batches)))
        assert held(batches) == {(0, name) for name in pool._published[0]}
        kinds = {event["type"] for _, payload in batches for event in decode_batch(payload)[1]}
        assert kinds == {"BlockStored", "BlockRemoved"}
        assert llm.reset_prefix_cache()
        until(lambda: len(replayed(dealer, 0)) > len(batches))
        assert held(replayed(dealer, 0)) == set()
        counts = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
        assert counts["frame_kv_events"] > 0
        assert counts["frame_kv_events_dropped"] == 0


@contextmanager
def example(port: int) -> Iterator[list[int]]:
    """What the example prints of an engine: the numbers of blocks."""
    command = [sys.executable, str(EXAMPLE), f"tcp://127.0.0.1:{port}", f"tcp://127.0.0.1:{port + 2}"]
    seen: list[int] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = process.stdout

        def read() -> None:
            with suppress(ValueError):
                seen.extend(int(line.removesuffix(" blocks\n")) for line in lines)

        reader = threading.Thread(target=read)
        reader.start()
        try:
            yield seen
        finally:
            process.terminate()
            reader.join(10)


def complete(running: Running, prompt: str) -> None:
    body = {"model": "demo", "prompt": prompt, "max_tokens": 30, "ignore_eos": True}
    assert httpx.post(f"{running.url}/v1/completions", json=body, timeout=60).status_code == 200


def by_rank(running: Running, name: str) -> list[float]:
    text = httpx.get(running.url + "/metrics", timeout=60).text
    return [float(value) for value in re.findall(rf"^{name}{{.*}} (\S+)$", text, re.MULTILINE)]


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_the_example_follows_the_engines_of_a_server() -> None:
    """Two ranks have ports of their own; an engine that dies begins anew, and so does what is known of it."""
    port = free_ports(4)
    settings = {"endpoint": f"tcp://127.0.0.1:{port}", "replay-endpoint": f"tcp://127.0.0.1:{port + 2}"}
    flags = [part for name, value in settings.items() for part in (f"--kv-events-{name}", value)]
    ranks = ("--data-parallel-size", "2", "--num-threads", "1", "--disable-access-log")
    with server(REAL, *flags, *ranks) as running, example(port) as one, example(port + 1) as other:
        until(lambda: one == [0] and other == [0])
        number = 0
        while min([one[-1], other[-1]]) < 4:
            complete(running, f"{number} little mice lived in a house, " * 5)
            number += 1
            assert number < 50
        assert len(counts := by_rank(running, "frame_kv_events_total")) == 2
        assert min(counts) > 0
        with example(port) as late:  # it asks for what it missed
            until(lambda: bool(late) and late[-1] == one[-1])
        os.kill(running.children_named("engine")[0], signal.SIGKILL)
        until(lambda: one[-1] == 0 or other[-1] == 0)
        gone = one if one[-1] == 0 else other
        until(lambda: by_rank(running, "frame_engine_up") == [1.0, 1.0])
        while gone[-1] < 4:
            complete(running, f"{number} big mice lived in a barn, " * 5)
            number += 1
            assert number < 100
