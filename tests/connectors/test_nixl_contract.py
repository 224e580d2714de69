"""The contract of connectors for `nixl` with a secret, so that it listens; tests/contract has it without one."""

from __future__ import annotations

import pytest

from frame.testing import ConnectorSuite
from tests.connectors.nixl_pairs import SECRET

pytest.importorskip("nixl")


@pytest.mark.some(1)
class TestNixl(ConnectorSuite):
    plugin = "nixl"

    @pytest.fixture(autouse=True)
    def _secret(self, _own_folder):
        secret = self.folder / "secret"
        secret.write_text(SECRET)
        self.options = {"secret_file": str(secret)}

    def test_engines_may_write_the_same_blocks_at_once(self):
        pytest.skip("tests/contract/test_connectors.py has it, and these engines write to no storage")
