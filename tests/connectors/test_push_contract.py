"""The contract of connectors for `push` with a secret, so that it listens; tests/contract has it without one."""

from __future__ import annotations

from typing import ClassVar

import pytest

from frame.plugins.connectors.push import worker as push_worker
from frame.testing import ConnectorSuite
from frame.testing.connector_ends_suite import ConnectorEnds
from frame.testing.connector_states_suite import STATES
from frame.testing.fake_cache import make_layout
from tests.connectors.mapped_files import FileSharing
from tests.connectors.push_pairs import SECRET, port


@pytest.mark.some(1)
class TestPush(ConnectorSuite):
    plugin = "push"

    @pytest.fixture(autouse=True)
    def _secret(self, _own_folder):
        secret = self.folder / "secret"
        secret.write_text(SECRET)
        self.options = {"secret_file": str(secret), "wait_seconds": 0.2, "expiry_seconds": 2}

    def test_engines_may_write_the_same_blocks_at_once(self):
        pytest.skip("tests/contract/test_connectors.py has it, and these engines write to no storage")


@pytest.mark.some(1)
class TestPushed(ConnectorEnds):
    """Where another engine takes the blocks of the prompts that are given."""

    plugin = "push"
    stores = False
    produces: ClassVar = {"do_remote_decode": True}
    shape: ClassVar = {}

    @pytest.fixture(autouse=True)
    def _taker(self, _own_folder):
        secret = self.folder / "secret"
        secret.write_text(SECRET)
        self.options = {"secret_file": str(secret), "wait_seconds": 0.1, "expiry_seconds": 1}
        takers = [self.engine(ranks=ranks) for ranks in (1, 2)]
        self.ports = [port(taker) for taker in takers]
        yield
        for taker in takers:
            taker.close()

    def engine(self, layout=None, broken_steps=(), *, ranks=1, **settings):
        if hasattr(self, "ports"):
            self.options = {**self.options, "decode": f"127.0.0.1:{self.ports[ranks - 1]}"}
        layout = layout or make_layout(ranks=ranks, **self.shape)
        return super().engine(layout, broken_steps, ranks=ranks, **settings)


@pytest.mark.matrix
class TestPushedStates(TestPushed):
    """Where states go with them."""

    shape: ClassVar = STATES["states"]


@pytest.mark.matrix
class TestPushedStatesAlone(TestPushed):
    """Where there are no blocks of tokens."""

    shape: ClassVar = STATES["states alone"]


@pytest.mark.matrix
class TestPushedToDevices(TestPushed):
    """Where blocks are written to the other engine's device."""

    @pytest.fixture(autouse=True)
    def _devices(self, monkeypatch, _own_folder, _taker):
        monkeypatch.setattr(push_worker, "sharing_of", lambda device: FileSharing(self.folder))
        takers = [ConnectorEnds.engine(self, make_layout(ranks=ranks, **self.shape), ranks=ranks) for ranks in (1, 2)]
        self.ports = [port(taker) for taker in takers]
        yield
        for taker in takers:
            taker.close()


@pytest.mark.matrix
class TestPushedStatesToDevices(TestPushedToDevices):
    """Where states go with them."""

    shape: ClassVar = STATES["states"]
