"""Two engines: one computed the prompts, the other takes them over as far as they match, and computes the rest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from frame.plugins.connectors.peer import client as peer_client
from frame.testing.checkpoints import make_checkpoint
from tests.connectors import peer_prompts
from tests.connectors.peer_prompts import CACHED, complete, make_llm, prompts


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("model"), "gemma2"))


@pytest.fixture(scope="module")
def alone(model):
    """What one engine without a connector says to the prompts, and to others."""
    llm = make_llm(model)
    yield lambda given: complete(llm, given)[0]
    llm.close()


@contextmanager
def holding(model, address, ranks=1):
    """The process of an engine that has computed the prompts."""
    process = subprocess.Popen(
        [sys.executable, peer_prompts.__file__, model, address, str(ranks)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        while (line := process.stdout.readline()) != "ready\n":
            assert line, "the engine that should hold the prompts ended"
        yield process
    finally:
        process.kill()
        process.communicate()


def kill_with_workers(process):
    """Ends the engine and its workers, which would answer until they miss it, and waits for all."""
    doomed = [process.pid]
    for pid in doomed:
        doomed += [child for child, parent in parents().items() if parent == pid]
    for pid in doomed:
        os.kill(pid, signal.SIGKILL)
    process.wait()
    while set(doomed) & parents().keys():
        time.sleep(0.01)


def parents():
    """The parent of each process that has not ended."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state != "Z":
                found[int(stat.parent.name)] = int(parent)
    return found


@pytest.fixture
def holder(model, tmp_path):
    """(address, process) of an engine that has computed the prompts."""
    address = f"unix:{tmp_path}/holder"
    with holding(model, address) as process:
        yield address, process


@pytest.mark.matrix
def test_each_of_two_ranks_loads_from_its_like_and_a_dead_peer_is_no_loss(model, tmp_path):
    address, ranks = f"unix:{tmp_path}/holder", 2
    given = prompts()
    llm = make_llm(model, ranks)
    expected = complete(llm, given)[0]
    llm.close()
    with holding(model, address, ranks) as process:
        llm = make_llm(model, ranks, peers=[address], lookup_seconds=20, retry_seconds=0)
        assert complete(llm, given) == (expected, CACHED)
        kill_with_workers(process)
        assert complete(llm, given) == (expected, [0] * len(given))
        assert llm.llm_engine.core.stats().kv_usage == 0
        llm.close()


def test_matched_prompts_are_loaded_others_computed_and_a_dead_peer_is_no_loss(model, alone, holder, monkeypatch):
    address, process = holder
    given = prompts()
    llm = make_llm(model, peers=[address], lookup_seconds=20, retry_seconds=0)
    assert complete(llm, given) == (alone(given), CACHED)
    partly, other = given[0][:40] + [9] * 30, [11] * 50
    found, cached = complete(llm, [partly, other])
    assert found == alone([partly, other])
    assert cached == [40, 0]

    # the peer dies when the first of several fetches is there
    monkeypatch.setattr("frame.plugins.connectors.blocks.worker.BATCH", 2)
    fetch = peer_client.PeerClient.fetch

    def fetch_once(self, keys, out):
        rows = fetch(self, keys, out)
        if process.poll() is None:
            process.send_signal(signal.SIGKILL)
            process.wait()
        return rows

    monkeypatch.setattr(peer_client.PeerClient, "fetch", fetch_once)
    assert complete(llm, given)[0] == alone(given)
    assert process.returncode == -signal.SIGKILL
    assert complete(llm, given) == (alone(given), [0] * len(given))
    assert llm.llm_engine.core.stats().kv_usage == 0
    llm.close()
