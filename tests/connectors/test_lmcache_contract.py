"""The contract of connectors for `lmcache`, with a server that speaks LMCache's protocol."""

from __future__ import annotations

import pytest

from frame.testing import ConnectorSuite
from tests.connectors.lmcache_server import FakeServer

pytest.importorskip("zmq")


class LMCacheCase(ConnectorSuite):
    """Engines of one server."""

    plugin = "lmcache"
    chunk = 8

    @property
    def shares(self):
        return True

    def engine(self, layout=None, broken_steps=(), **settings):
        """The first step of an engine that only stores is the first that computes: it waits for no answer."""
        if 0 in broken_steps:
            settings["kv_role"] = "producer"
        return super().engine(layout, broken_steps, **settings)


@pytest.mark.some(1)
class TestLMCache(LMCacheCase):
    @pytest.fixture(autouse=True)
    def _server(self, _own_folder):
        self.server = FakeServer(self.chunk)
        self.options = {"server": self.server.address, "lookup_seconds": 20}
        yield
        assert not any(self.server.locks.values()), "read locks were not given back"
        self.server.close()

    def damage(self):
        for name in self.server.objects:
            self.server.damage(name)
        return bool(self.server.objects)

    def damage_one(self, draw):
        self.server.damage(draw.choice(list(self.server.objects)))
        return True

    def test_a_real_model_gives_the_same_logits(self):
        pytest.skip("tests/connectors/test_lmcache_engine.py has real models")

    def test_a_real_model_on_two_ranks_gives_the_same_tokens(self):
        pytest.skip("tests/connectors/test_lmcache_engine.py has real models")
