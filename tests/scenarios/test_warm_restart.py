"""A server whose engine is killed, and one beside it: prompts come from shared memory instead of being computed."""

from __future__ import annotations

import os
import signal

import httpx
import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.server.running import REAL, Running, alive, server, until

PROMPTS = [f"Story {index}: " + "the fox went down to the sea again. " * 12 for index in range(3)]


def told(running: Running, prompt: str) -> str:
    body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
    answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["text"]
    return text


def counted(running: Running, name: str) -> float:
    text = httpx.get(running.url + "/metrics", timeout=60).text
    lines = [line for line in text.splitlines() if line.startswith(f"frame_kv_connector_offload_{name}_total{{")]
    return sum(float(line.split()[-1]) for line in lines)


def until_found(running: Running, num_tokens: int) -> None:
    """A server shows what it knew last of an engine that takes two seconds to answer, as on a busy machine."""
    until(lambda: counted(running, "hit_tokens") > num_tokens, 20, lambda: running.text)


def arguments(folder: object, *more: str) -> list[str]:
    shared = ["--plugin.offload.shared", "true", "--plugin.offload.shared_folder", str(folder)]
    return ["--kv-offloading-size", "0.02", *shared, "--num-threads", "1", *more]


@pytest.mark.parametrize(
    "more",
    [
        pytest.param((), id="one"),
        pytest.param(("--tensor-parallel-size", "2"), id="two ranks", marks=pytest.mark.matrix),
    ],
)
def test_kill_9_leaves_a_readable_tier(tmp_path, more):
    with server(REAL, *arguments(tmp_path, *more)) as running:
        first = [told(running, prompt) for prompt in PROMPTS]
        assert counted(running, "hit_tokens") == 0
        engine = running.children()["engine"]
        os.kill(engine, signal.SIGKILL)
        until(lambda: not alive(engine))
        assert [told(running, prompt) for prompt in PROMPTS] == first
        until_found(running, 3 * 100)
        assert counted(running, "checked_read_bytes") > 0
        assert counted(running, "checked_failed_blocks") == 0
        running.until_said("are there from an engine before this one")
        running.stop()
        assert running.process.returncode == 0, running.text
    assert not list(tmp_path.iterdir())


@pytest.mark.matrix
@pytest.mark.parametrize("family", ["mamba2", "qwen3-next"])
def test_kill_9_leaves_states_that_are_found(tmp_path, family):
    """Of a model in which nothing keeps tokens, and of one with attention beside states."""
    folder = make_checkpoint(tmp_path / "model", family)
    (tmp_path / "memory").mkdir()
    given = [[3 + (7 * i * (j + 1) + j) % 400 for i in range(90)] for j in range(3)]
    more = ["--model", str(folder), "--skip-tokenizer-init", "--served-model-name", "states", "--block-size", "16"]

    def tokens(running, prompt):
        body = {"model": "states", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        body["return_token_ids"] = True
        answer = httpx.post(f"{running.url}/v1/completions", json=body, timeout=120)
        assert answer.status_code == 200, answer.text
        return answer.json()["choices"][0]["token_ids"]

    with server(REAL, *arguments(tmp_path / "memory", *more)) as running:
        first = [tokens(running, prompt) for prompt in given]
        engine = running.children()["engine"]
        os.kill(engine, signal.SIGKILL)
        until(lambda: not alive(engine))
        assert [tokens(running, prompt) for prompt in given] == first
        until_found(running, 3 * 80 - 1)
        assert counted(running, "hit_tokens") == 3 * 80
        assert counted(running, "loaded_states") == 3
        assert counted(running, "checked_failed_blocks") == 0
        running.stop()
        assert running.process.returncode == 0, running.text
    assert not list((tmp_path / "memory").iterdir())


@pytest.mark.matrix
def test_a_worker_that_is_killed_leaves_a_readable_tier(tmp_path):
    with server(REAL, *arguments(tmp_path, "--tensor-parallel-size", "2")) as running:
        first = [told(running, prompt) for prompt in PROMPTS]
        os.kill(running.below("engine")[1], signal.SIGKILL)
        assert [told(running, prompt) for prompt in PROMPTS] == first
        until_found(running, 3 * 100)
        running.stop()
    assert not list(tmp_path.iterdir())


@pytest.mark.matrix
def test_a_server_of_two_ranks_finds_what_one_of_one_stored(tmp_path):
    with server(REAL, *arguments(tmp_path)) as first:
        texts = [told(first, prompt) for prompt in PROMPTS]
        with server(REAL, *arguments(tmp_path, "--tensor-parallel-size", "2")) as second:
            assert [told(second, prompt) for prompt in PROMPTS] == texts
            until_found(second, 3 * 100)
            assert counted(second, "shared_failed_blocks") == 0


@pytest.mark.matrix
def test_a_second_server_finds_what_the_first_stored(tmp_path):
    with server(REAL, *arguments(tmp_path)) as first:
        texts = [told(first, prompt) for prompt in PROMPTS]
        with server(REAL, *arguments(tmp_path)) as second:
            assert [told(second, prompt) for prompt in PROMPTS] == texts
            until_found(second, 3 * 100)
            assert counted(second, "shared_read_bytes") > 0
            assert counted(second, "shared_failed_blocks") == 0
