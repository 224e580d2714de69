"""A prefill engine that is stopped while it is read over TCP: its blocks arrive after nobody waits for them."""

from __future__ import annotations

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

import pytest

from frame.core.engine import engine as engine_module
from frame.plugins.connectors.nixl import agent as nixl_agent, worker as nixl_worker
from frame.testing.checkpoints import make_checkpoint
from tests.connectors.nixl_prompts import Asked, Prefill, open_engine

pytest.importorskip("nixl")

STALL_SECONDS = 0.3
PROMPTS = [[3 + (7 * i + shift) % 400 for i in range(90)] for shift in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama")


class Sides:
    """The process of a prefill engine, and a decode engine, of which one read stalls; `memory` is its KV cache."""

    def __init__(self, there, engine, memory):
        self.there, self.engine, self.memory = there, engine, memory
        self.here = Asked(engine)

    def travel(self, name, prompt):
        """A prompt's blocks are read: its tokens are those of this engine alone."""
        self.here.add(name, prompt, self.there.prefill(prompt))
        tokens = self.here.finish(name)
        assert self.here.num_cached(name) == len(prompt) - 1
        assert tokens == self.here.alone(prompt)

    def stall(self, name, prompt):
        """The other engine is stopped before it can answer a read, which nobody waits for in the end."""
        begin = nixl_agent.Agent._begin

        def stopped(agent, read):
            self.stop()
            return begin(agent, read)

        self.here.add(name, prompt, self.there.prefill(prompt))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(nixl_agent.Agent, "_begin", stopped)
            self.here.finish(name)
        assert self.here.num_cached(name) == 0
        assert list(self.engine.scheduler.lifecycle.abandoned) == [name]

    def stop(self):
        os.kill(self.there.process.pid, signal.SIGSTOP)
        threads = list(Path(f"/proc/{self.there.process.pid}/task").glob("*/stat"))
        while not all(thread.read_text().rpartition(") ")[2].startswith("T") for thread in threads):
            time.sleep(0.001)

    def go_on(self):
        os.kill(self.there.process.pid, signal.SIGCONT)

    def read(self):
        """The bytes of the KV cache."""
        return [view.bytes.clone() for view in self.memory]


@pytest.fixture
def sides(model, tmp_path, monkeypatch):
    monkeypatch.setenv("UCX_TLS", "tcp")  # memory of this machine is else read without the other engine's help
    (tmp_path / "secret").write_text("a secret of the tests")
    memory, register = [], nixl_worker.NixlWorker.register

    def registered(worker, caches):
        memory[:] = caches.values() or memory
        register(worker, caches)

    monkeypatch.setattr(nixl_worker.NixlWorker, "register", registered)
    monkeypatch.setattr(engine_module, "TRANSFER_SECONDS", STALL_SECONDS)
    monkeypatch.setattr(nixl_agent, "_CLOSE_SECONDS", STALL_SECONDS)
    there = Prefill(model, tmp_path / "secret")
    try:
        options = {"retry_seconds": 0, "stall_seconds": STALL_SECONDS}
        with open_engine(model, tmp_path / "secret", **options) as engine:
            there.wait_ready()
            made = Sides(there, engine, memory)
            made.travel("first", PROMPTS[0])
            yield made
    finally:
        there.close()


def test_sleep_refuses_while_a_stalled_read_may_still_write(sides):
    sides.stall("stalled", PROMPTS[1])
    refusal = r"a read from \S+ has gone on for \d+ s and may still write to the KV cache: try again later"
    with pytest.raises(RuntimeError, match=refusal):
        sides.engine.call("sleep")
    assert not sides.engine.call("is_sleeping")
    assert sides.here.alone(PROMPTS[2])
    sides.go_on()
    latest = time.monotonic() + 60
    while not sides.engine.call("is_sleeping"):
        assert time.monotonic() < latest, "the read does not end"
        with suppress(RuntimeError):
            sides.engine.call("sleep")
    sides.engine.call("wake_up")
    assert sides.here.rest() == 0
    sides.travel("later", PROMPTS[3])


def test_nothing_is_written_once_an_engine_is_closed(sides):
    """What the other engine sends later reaches no memory that others may have by then."""
    sides.stall("stalled", PROMPTS[1])
    sides.engine.close()
    for view in sides.memory:
        view.bytes.fill_(0x55)
    sides.go_on()
    latest = time.monotonic() + 2
    while time.monotonic() < latest and sides.there.process.poll() is None:  # UCX may end it
        assert all(bool((blocks == 0x55).all()) for blocks in sides.read())
        time.sleep(0.01)
