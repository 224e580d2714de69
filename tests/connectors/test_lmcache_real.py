"""The contract of connectors for `lmcache` with LMCache's own server.

It runs where FRAME_TEST_LMCACHE names a virtual environment with the package lmcache, which cannot be that of frame;
the server's process needs libibverbs.so.1 in its library path.
"""

from __future__ import annotations

import os
import signal
import time

import pytest

from frame.testing.connector_engines import ConnectorEngines
from frame.testing.engines import request
from tests.connectors.lmcache_server import RealServer
from tests.connectors.test_lmcache_contract import LMCacheCase

FOLDER = os.environ.get("FRAME_TEST_LMCACHE", "")

pytestmark = pytest.mark.skipif(not FOLDER, reason="FRAME_TEST_LMCACHE names no virtual environment with lmcache")


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    made = RealServer(FOLDER, LMCacheCase.chunk, tmp_path_factory.mktemp("lmcache") / "log")
    yield made
    made.close()


class TestRealServer(LMCacheCase):
    @pytest.fixture(autouse=True)
    def _server(self, _own_folder, server):
        server.clear()
        self.options = {"server": server.address, "lookup_seconds": 20}

    def damage(self):
        pytest.skip("tests/connectors/test_lmcache_contract.py damages objects")

    def damage_one(self, draw):
        pytest.skip("tests/connectors/test_lmcache_contract.py damages objects")


class TestFaults(ConnectorEngines):
    """What happens to a server while an engine uses it."""

    plugin = "lmcache"

    @pytest.fixture(autouse=True)
    def _servers(self, _own_folder):
        self.servers = []
        yield
        for server in self.servers:
            server.close()

    def start(self, chunk=8, **settings):
        self.servers.append(RealServer(FOLDER, chunk, self.folder / "log", **settings))
        self.options = {
            "server": self.servers[-1].address, "lookup_seconds": 5, "timeout_seconds": 1, "retry_seconds": 0.2
        }  # fmt: skip
        return self.servers[-1]

    def until_found(self, engine, tokens):
        """Computes prompts until another engine finds one of them, with so many tokens."""
        deadline, number = time.monotonic() + 60, 0
        while True:
            assert time.monotonic() < deadline
            number += 1
            prompt = self.prompt(30, seed=100 + number)
            engine.run(request(f"again {number}", prompt))
            other = self.engine()
            other.run(request("found", prompt))
            other.check()
            other.close()
            if other.num_cached("found") == tokens:
                break

    def test_a_server_that_hangs_and_goes_on(self):
        server = self.start()
        engine = self.engine()
        engine.run(request("before", self.prompt(30)))
        server.process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        engine.run(*(request(f"while {seed}", self.prompt(30, seed=seed)) for seed in range(4)))
        assert time.monotonic() - begun < 30
        server.process.send_signal(signal.SIGCONT)
        self.until_found(engine, 24)
        engine.check()
        engine.close()

    def test_a_server_that_is_killed_and_comes_back_with_other_chunks(self):
        server = self.start()
        engine = self.engine()
        engine.run(request("before", self.prompt(30)))
        engine.add(request("in the middle", self.prompt(40, seed=1)))
        engine.step()
        server.process.kill()
        server.process.wait()
        engine.run(request("while", self.prompt(30, seed=2)), request("found no more", self.prompt(30)))
        self.start(chunk=4, port=server.port)
        self.until_found(engine, 28)
        engine.check()
        engine.close()

    def test_a_server_that_makes_room_for_others(self):
        """Its memory holds few prompts, and what it gave away is used for other objects at once."""
        self.start(size_gb=0.0005)
        engine = self.engine()
        for turn in range(2):
            prompts = [self.prompt(40, seed=seed) for seed in range(60)]
            for seed, prompt in enumerate(prompts):
                engine.run(request(f"{turn} {seed}", prompt))
        self.until_found(engine, 24)
        engine.check()
        engine.close()
