"""One server over engines of two machines, here two addresses of this one that share no folder but the tests' own."""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.core.config.checkpoint import DEMO_FOLDER
from frame.testing.checkpoints import make_checkpoint
from tests.free_ports import free_ports
from tests.server.running import FAKE, REAL, Running, alive, server, until
from tests.server.test_data_parallel import by_engine, texts

QUIET = ("--disable-access-log",)
_SECRET = "a secret of these tests"


class Pair:
    """The flags of two machines, each with a file of its own that holds the secret."""

    def __init__(self, folder: Path, size: int = 4) -> None:
        self.port = free_ports()
        self._folder, self._size = folder, size

    def flags(self, name: str, secret: str = _SECRET) -> tuple[str, ...]:
        file = self._folder / name
        file.write_text(f"{secret}\n")
        values = {"size": self._size, "size-local": self._size // 2, "address": "127.0.0.1", "rpc-port": self.port}
        flags = [part for key, value in values.items() for part in (f"--data-parallel-{key}", str(value))]
        return (*flags, "--data-parallel-secret-file", str(file), *QUIET)

    def head(self) -> tuple[str, ...]:
        return self.flags("head")

    def other(self, *more: str, start: int | None = None, **changes: str) -> tuple[str, ...]:
        first = self._size // 2 if start is None else start
        own = ("--headless", "--data-parallel-start-rank", str(first), "--data-parallel-own-address", "127.0.0.2")
        return (*self.flags("other", **changes), *own, *more)


@pytest.fixture
def pair(tmp_path: Path) -> Pair:
    return Pair(tmp_path)


@contextmanager
def machine(command: list[str], *arguments: str) -> Iterator[Running]:
    running = Running(command, *arguments)
    try:
        yield running
    finally:
        running.stop()


def up(running: Running) -> dict[str, float]:
    return by_engine(running, "frame_engine_up")


@contextmanager
def both(pair: Pair, *more: str) -> Iterator[tuple[Running, Running]]:
    """A server and the other machine, with engines that have no model."""
    with machine(FAKE, *pair.other(*more)) as other, server(FAKE, *pair.head(), *more) as head:
        yield head, other


@pytest.mark.matrix
def test_engines_of_both_machines_get_requests_and_are_seen(pair: Pair) -> None:
    with both(pair, "--api-server-count", "2") as (head, other):
        assert (len(head.children_named("engine")), len(other.children_named("engine"))) == (2, 2)
        assert other.children_named("api") == []
        assert all(texts(head, [{"prompt": f"{index} words", "max_tokens": 40} for index in range(24)]))
        stats = httpx.get(f"{head.url}/stats").json()["engine"]
        assert [one["rank"] for one in stats["ranks"]] == [0, 1, 2, 3]
        assert stats["generated_tokens"] == 24 * 40
        assert min(one["generated_tokens"] for one in stats["ranks"]) > 0
        assert up(head) == {"0": 1, "1": 1, "2": 1, "3": 1}
        assert "stage" not in other.text
        head.process.send_signal(signal.SIGTERM)
        assert (head.wait(), other.wait()) == (0, 0), "the server said that it ended"


@pytest.mark.matrix
def test_a_killed_machine_costs_no_request_and_comes_back(pair: Pair) -> None:
    requests = [{"prompt": f"{index} words", "max_tokens": 300} for index in range(12)]
    with server(FAKE, *QUIET) as alone:
        calm = texts(alone, requests)
    delay = ("--plugin.fake.delay", "0.005")
    with both(pair, *delay) as (head, other), ThreadPoolExecutor(1) as threads:
        before = head.children_named("engine")
        answers = threads.submit(texts, head, requests)
        until(lambda: sum(by_engine(head, "frame_num_requests_running").values()) == 12)
        assert min(by_engine(head, "frame_num_requests_running").values()) > 0
        engines = other.children_named("engine")
        os.kill(other.process.pid, signal.SIGKILL)
        assert answers.result() == calm
        assert up(head) == {"0": 1, "1": 1, "2": 0, "3": 0}
        assert httpx.get(f"{head.url}/health").status_code == 200
        head.until_said("engine 2: the machine at 127.0.0.2 is gone; it may come back, the others serve on")
        until(lambda: not any(map(alive, engines)))
        with machine(FAKE, *pair.other(*delay)):
            until(lambda: set(up(head).values()) == {1})
            assert texts(head, requests) == calm
            assert min(by_engine(head, "frame_engine_steps_total").values()) > 0
        assert head.children_named("engine") == before


@pytest.mark.matrix
def test_an_engine_that_dies_on_the_other_machine_is_started_again_there(pair: Pair) -> None:
    requests = [{"prompt": f"{index} words", "max_tokens": 300} for index in range(8)]
    with both(pair, "--plugin.fake.delay", "0.005") as (head, other), ThreadPoolExecutor(1) as threads:
        calm = texts(head, requests)
        answers = threads.submit(texts, head, requests)
        until(lambda: sum(by_engine(head, "frame_num_requests_running").values()) == 8)
        os.kill(other.children_named("engine")[0], signal.SIGKILL)
        assert answers.result() == calm
        until(lambda: set(up(head).values()) == {1})
        head.until_said("engine [23]: the engine process was killed by SIGKILL; starting it again")


@pytest.mark.matrix
def test_the_engines_outlive_a_server_that_is_killed(pair: Pair) -> None:
    with machine(FAKE, *pair.other()) as other:
        with server(FAKE, *pair.head()) as head:
            engines = sorted(other.children_named("engine"))
            os.kill(head.process.pid, signal.SIGKILL)
            head.wait()
        until(lambda: "is gone; waiting for the next one" in other.text)
        with server(FAKE, *pair.head()) as head:
            assert set(up(head).values()) == {1}
            assert all(texts(head, [{"prompt": f"{index} words", "max_tokens": 4} for index in range(8)]))
            assert min(by_engine(head, "frame_engine_steps_total").values()) > 0
            assert sorted(other.children_named("engine")) == engines


@pytest.mark.some(2)
@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (lambda pair: pair.other(secret="another secret of tests"), "has another key, or is no engine of frame"),
        (
            lambda pair: pair.other("--block-size", "32"),
            "the machine at 127.0.0.2 was given cache.block_size 32, the server 0; all machines need the same",
        ),
        (
            lambda pair: pair.other("--data-parallel-size", "8"),
            "was given data_parallel.data_parallel_size 8, the server 4; all machines need the same",
        ),
        (lambda pair: pair.other(start=1), "it starts engine 1, and the server waits for engines 2, 3"),
    ],
    ids=["secret", "setting", "size", "ranks"],
)
def test_a_machine_that_does_not_fit_is_refused(pair: Pair, arguments: Callable[[Pair], tuple[str, ...]], said: str):
    with machine(FAKE, *pair.head()) as head, machine(FAKE, *arguments(pair)) as other:
        assert other.wait() == 1
        assert said in other.text.splitlines()[-1]
        assert "Traceback" not in other.text
        assert head.process.poll() is None, "it waits on"


def test_other_weights_are_refused(pair: Pair, tmp_path: Path) -> None:
    folder = shutil.copytree(DEMO_FOLDER, tmp_path / "model")
    weights = bytearray((folder / "model.safetensors").read_bytes())
    weights[-256:] = bytes(256)
    (folder / "model.safetensors").write_bytes(weights)
    with machine(FAKE, *pair.head()), machine(FAKE, *pair.other("--model", str(folder))) as other:
        assert other.wait() == 1
        assert re.search(r"was given the file model.safetensors \w{12}, the server \w{12}; all", other.text)


@pytest.mark.matrix
def test_a_machine_that_never_comes_is_named(pair: Pair) -> None:
    with machine(FAKE, *pair.head(), "--ready-seconds", "2") as head:
        assert head.wait() == 1
    assert (
        f"frame: no machine came to 127.0.0.1:{pair.port} with engines 2, 3 of 4 within 2 seconds (ready_seconds); "
        "start it with --headless --data-parallel-start-rank 2"
    ) in head.text


def test_a_server_that_is_not_there_is_named(pair: Pair) -> None:
    with machine(FAKE, *pair.other("--ready-seconds", "1")) as other:
        assert other.wait() == 1
    assert re.search(f"the server at 127.0.0.1:{pair.port} did not let this machine in within 1 seconds", other.text)
    assert "Connection refused" in other.text


def test_a_port_in_use_is_named(pair: Pair) -> None:
    with socket.create_server(("127.0.0.1", pair.port)), machine(FAKE, *pair.head()) as head:
        assert head.wait() == 1
    assert (
        f"frame: cannot listen at 127.0.0.1:{pair.port} for the other machines: Address already in use; choose another "
        "--data-parallel-rpc-port or --data-parallel-address, on all machines"
    ) in head.text


@pytest.mark.matrix
def test_a_second_machine_with_the_same_ranks_waits(pair: Pair) -> None:
    with both(pair) as (head, _), machine(FAKE, *pair.other()) as twin:
        until(lambda: "engines 2, 3 came from 127.0.0.2 already" in twin.text)
        assert twin.children_named("engine") == []
        assert set(up(head).values()) == {1}


@pytest.mark.matrix
def test_an_engine_that_cannot_start_there_is_named_at_both(pair: Pair) -> None:
    with machine(FAKE, *pair.head()) as head, machine(FAKE, *pair.other("--plugin.fake.broken", "no device")) as other:
        assert other.wait() == 1
        assert re.search(r"engine [23]: no device", other.text)
        until(lambda: "the machine at 127.0.0.2 with engines 2, 3 is gone: engine " in head.text)
        with machine(FAKE, *pair.other()):
            head.wait_ready()


@pytest.mark.matrix
@pytest.mark.timeout(300)
def test_two_machines_give_the_tokens_of_one_engine_also_when_one_is_killed(tmp_path: Path) -> None:
    requests: list[dict[str, Any]] = [
        {"prompt": f"Once upon a time {index}", "temperature": index % 2, "seed": index, "max_tokens": 64}
        for index in range(6)
    ]
    settings = ("--deterministic", "--num-threads", "1", "--served-model-name", "demo", *QUIET)
    with server(REAL, *settings) as running:
        alone = texts(running, requests)
    pair = Pair(tmp_path, 2)
    here, there = (str(shutil.copytree(DEMO_FOLDER, tmp_path / name)) for name in ("here", "there"))
    with (
        machine(REAL, *pair.other("--model", there, *settings)) as other,
        server(REAL, *pair.head(), "--model", here, *settings) as running,
        ThreadPoolExecutor(1) as threads,
    ):
        assert texts(running, requests) == alone
        assert min(by_engine(running, "frame_engine_steps_total").values()) > 0
        answers = threads.submit(texts, running, requests)
        until(lambda: by_engine(running, "frame_num_requests_running")["1"] >= 1)
        os.kill(other.process.pid, signal.SIGKILL)
        assert answers.result() == alone


SHARED = ("--enable-expert-parallel", "--plugin.fake.delay", "0.005")


@pytest.mark.matrix
@pytest.mark.parametrize("victim", ["the server's", "the other machine's"])
def test_engines_that_share_experts_end_and_start_again_on_both_machines(pair: Pair, victim: str) -> None:
    requests = [{"prompt": f"{index} words", "max_tokens": 300} for index in range(8)]
    with both(pair, *SHARED) as (head, other), ThreadPoolExecutor(1) as threads:
        calm = texts(head, requests)
        for _ in range(2):
            answers = threads.submit(texts, head, requests)
            until(lambda: sum(by_engine(head, "frame_num_requests_running").values()) == 8)
            before = [*head.children_named("engine"), *other.children_named("engine")]
            os.kill(before[1 if victim == "the server's" else 2], signal.SIGKILL)
            assert answers.result() == calm
            until(lambda: set(up(head).values()) == {1})
            after = [*head.children_named("engine"), *other.children_named("engine")]
            assert len(after) == 4
            assert not set(after) & set(before)
        ranks = "01" if victim == "the server's" else "23"
        head.until_said(r"engine \d, with which it shares experts, is gone: the engine process was killed", 6)
        causes = re.findall(
            r"engine (\d), with which it shares experts, is gone: the engine process was killed", head.text
        )
        assert len(causes) == 6
        assert set(causes) <= set(ranks)
        head.process.send_signal(signal.SIGTERM)
        assert (head.wait(), other.wait()) == (0, 0), "the server said that it ended"


@pytest.mark.matrix
def test_a_machine_whose_engines_share_experts_takes_the_server_along(pair: Pair) -> None:
    with both(pair, *SHARED) as (head, other):
        engines = [*head.children_named("engine"), *other.children_named("engine")]
        os.kill(other.process.pid, signal.SIGKILL)
        assert head.wait() == 1
        assert "with which it shares experts, is gone: the machine at 127.0.0.2 with engines 2, 3 is gone" in head.text
        assert "engine 2: the machine at 127.0.0.2 is gone; the others share its experts and end, too" in head.text
        assert "the others serve on" not in head.text
        until(lambda: not any(map(alive, engines)))


@pytest.mark.matrix
def test_a_machine_whose_engines_share_experts_ends_with_the_server(pair: Pair) -> None:
    with both(pair, *SHARED) as (head, other):
        engines = [*head.children_named("engine"), *other.children_named("engine")]
        os.kill(head.process.pid, signal.SIGKILL)
        assert other.wait() == 1
        assert "is gone, whose engines share experts with those here" in other.text
        until(lambda: not any(map(alive, engines)))


@pytest.mark.matrix
def test_a_machine_that_cannot_start_engines_that_share_experts_ends_the_start_with_the_cause(pair: Pair) -> None:
    with machine(FAKE, *pair.other(*SHARED, "--plugin.fake.broken", "no memory")) as other:
        head = Running(FAKE, *pair.head(), *SHARED, "--plugin.fake.startup", "5")
        try:
            assert head.wait() == 1
        finally:
            head.stop()
        assert other.wait() == 1
        assert re.search(r"the machine at 127.0.0.2 with engines 2, 3 is gone: engine [23]: no memory", head.text)


@pytest.mark.matrix
@pytest.mark.timeout(600)
def test_machines_share_the_experts_of_a_model(tmp_path: Path) -> None:
    """Each has half of the experts, which the tokens of both need; a killed engine ends and starts both."""
    folder = make_checkpoint(tmp_path / "one", "qwen3-moe", tokenizer=True)
    elsewhere = shutil.copytree(folder, tmp_path / "two")
    small = ("--num-threads", "1", "--max-model-len", "128", "--kv-cache-memory-bytes", "4194304")
    small = (*small, "--dtype", "float32", "--served-model-name", "demo")
    requests = [{"prompt": [5 + index, 6, 7], "max_tokens": 12, "temperature": 0} for index in range(4)]
    with server([*REAL, str(folder)], *small, *QUIET) as alone:
        calm = texts(alone, requests)
    pair, shared = Pair(tmp_path, 2), (*small, "--enable-expert-parallel")
    with (
        machine([*REAL, str(elsewhere)], *pair.other(*shared)) as other,
        server([*REAL, str(folder)], *pair.head(), *shared) as head,
    ):
        assert texts(head, requests) == calm
        assert min(by_engine(head, "frame_engine_steps_total").values()) > 0
        before = other.children_named("engine")
        os.kill(before[0], signal.SIGKILL)
        until(lambda: "engine 1: the engine process was killed by SIGKILL; starting it again" in head.text)
        assert texts(head, requests) == calm
        assert other.children_named("engine") != before
