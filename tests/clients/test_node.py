"""SDKs from npm against a server without flags: plain and structured answers, streams, tools."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.clients.conftest import RUN_SECONDS, run
from tests.server.running import Running

pytestmark = pytest.mark.slow


@pytest.mark.timeout(900)
@pytest.mark.parametrize("script", ["openai.mjs", "anthropic.mjs", "ai.mjs"])
def test_an_sdk(node_modules: Path, running: Running, script: str) -> None:
    assert run(["node", str(node_modules / script), running.url], RUN_SECONDS).rstrip().endswith("done")
