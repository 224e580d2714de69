"""The contract of connectors for `lmcache` with LMCache's own server.

It runs where FRAME_TEST_LMCACHE names a virtual environment with the package lmcache, which cannot be that of frame;
the server's process needs libibverbs.so.1 in its library path.
"""

from __future__ import annotations

import os

import pytest

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
