"""The contract of connectors for `nixl`."""

from __future__ import annotations

import pytest

from frame.testing import ConnectorSuite
from tests.connectors.nixl_pairs import SECRET

pytest.importorskip("nixl")


class TestNixl(ConnectorSuite):
    plugin = "nixl"

    @pytest.fixture(autouse=True)
    def _secret(self, _own_folder):
        secret = self.folder / "secret"
        secret.write_text(SECRET)
        self.options = {"secret_file": str(secret)}
