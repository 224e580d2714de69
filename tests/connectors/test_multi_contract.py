"""The contract of connectors for `multi`; `tests/connectors/test_multi.py` has what `make test` runs of it."""

from __future__ import annotations

import pytest

from frame.testing import ConnectorSuite

pytestmark = pytest.mark.matrix


class Multi(ConnectorSuite):
    plugin = "multi"

    def disk(self, name):
        return {"kv_connector": "disk", "options": {"folder": str(self.scratch(name))}}


class TestTwins(Multi):
    """Two disks, of which a prompt may be in one alone."""

    @property
    def shares(self):
        return True

    @pytest.fixture(autouse=True)
    def _connectors(self, _own_folder):
        self.options = {"connectors": [self.disk("near"), self.disk("far")]}


class TestMixed(Multi):
    """A tier in host memory before a disk: loads that end in a later step beside loads that end in theirs."""

    @property
    def shares(self):
        return True

    @pytest.fixture(autouse=True)
    def _connectors(self, _own_folder):
        offload = {"kv_connector": "offload", "options": {"size": 0.001}}
        self.options = {"connectors": [offload, self.disk("disk")]}
