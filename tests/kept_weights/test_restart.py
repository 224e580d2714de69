"""Servers whose engine is killed: the next one finds the weights in memory, and reads none of the checkpoint's."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.kept_weights.engines import FOUND, KEEPS, LOADED, damage
from tests.server.running import REAL, Running, alive, server, until

PROMPTS = [[3 + (7 * i * (j + 1) + j) % 400 for i in range(20)] for j in range(3)]
#: Large enough that weights are used where they lie.
WIDE = {"hidden_size": 512, "intermediate_size": 1024}


def tokens(running: Running) -> list[list[int]]:
    found = []
    for prompt in PROMPTS:
        body: dict[str, Any] = {"model": "m", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        found.append(answer.json()["choices"][0]["token_ids"])
    return found


def check(running: Running, **counts: int) -> None:
    """How often it has said each of these by now."""
    lines = {"keeps": KEEPS, "found": FOUND, "loaded": LOADED}
    for name, count in counts.items():
        running.until_said(re.escape(lines[name]), count)
    assert {name: running.text.count(lines[name]) for name in counts} == counts, running.text


def kill(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    until(lambda: not alive(pid))


def arguments(folder: Path, *more: str) -> list[str]:
    names = ["--model", str(folder), "--skip-tokenizer-init", "--served-model-name", "m"]
    return [*names, "--keep-weights", "--num-threads", "1", "--max-model-len", "128", *more]


def test_the_next_engine_reads_no_weights(tmp_path):
    folder = make_checkpoint(tmp_path / "model", "llama-tied", **WIDE)
    with server(REAL, *arguments(folder)) as running:
        want = tokens(running)
        check(running, keeps=1)
        damage(folder)
        kill(running.children()["engine"])
        assert tokens(running) == want
        check(running, found=1, loaded=1)
        running.stop()
        assert running.process.returncode == 0, running.text


@pytest.mark.matrix
@pytest.mark.parametrize("more", [(), ("--quantization", "int4")], ids=["plain", "int4"])
def test_two_ranks_in_processes_of_their_own(more, tmp_path):
    folder = make_checkpoint(tmp_path / "model", "qwen3", **WIDE)
    with server(REAL, *arguments(folder, "--tensor-parallel-size", "2", *more)) as running:
        want = tokens(running)
        check(running, keeps=2)
        damage(folder)
        kill(running.below("engine")[1])  # a worker: the engine ends with it
        assert tokens(running) == want
        check(running, found=2, loaded=2)
        kill(running.children()["engine"])
        assert tokens(running) == want
        check(running, found=4, loaded=2)
        running.stop()
        assert running.process.returncode == 0, running.text


@pytest.mark.matrix
def test_other_weights_are_never_mistaken_for_the_first(tmp_path):
    """After `update_weights` the next engine has the new weights, which are kept in their place."""
    folder = make_checkpoint(tmp_path / "a", "qwen3", **WIDE)
    other = make_checkpoint(tmp_path / "b", "qwen3", seed=1, **WIDE)
    admin = tmp_path / "admin"
    more = ["--admin-uds", str(admin), "--weights-root", str(tmp_path)]
    with server(REAL, *arguments(folder, *more)) as running:
        first = tokens(running)
        with httpx.Client(transport=httpx.HTTPTransport(uds=str(admin)), base_url="http://admin", timeout=60) as client:
            client.post("/pause").raise_for_status()
            client.post("/update_weights", json={"model": str(other)}).raise_for_status()
            client.post("/resume").raise_for_status()
        want = tokens(running)
        assert want != first
        damage(other)
        for time in (1, 2):
            kill(running.children()["engine"])
            assert tokens(running) == want
            check(running, found=time, loaded=1)
