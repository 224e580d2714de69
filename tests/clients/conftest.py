"""A server of the demo model for client libraries, and folders into which they are installed by name."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest

from tests.server.running import REAL, Running, server

HERE = Path(__file__).parent
INSTALL_SECONDS = 500
RUN_SECONDS = 200


@pytest.fixture(scope="session")
def running() -> Iterator[Running]:
    """No flag says anything of tools or formats: clients must do without."""
    with server(REAL, "--disable-access-log", "--num-threads", "1") as running:
        yield running


def run(command: list[str], seconds: float, **environment: str) -> str:
    """What a program prints; fails with it unless the program ends well."""
    given = {**os.environ, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=given)
    assert done.returncode == 0, f"{command[-2:]}: {done.stdout[-2000:]}\n{done.stderr[-4000:]}"
    return done.stdout


@pytest.fixture(scope="session")
def python_client(tmp_path_factory: pytest.TempPathFactory, running: Running) -> Callable[..., str]:
    """Installs packages into a folder of their own and runs a script of this folder with them."""

    def client(script: str, *packages: str) -> str:
        folder = str(tmp_path_factory.mktemp("python") / "packages")
        pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
        run([*pip, "--target", folder, *packages], INSTALL_SECONDS)
        # without the project's own packages, so that each library has the versions that it asks for
        return run(
            [sys.executable, "-I", "-S", "-c", _RUN, folder, str(HERE / script), running.url], RUN_SECONDS, **QUIET
        )

    return client


#: Runs a script with a folder of packages and the standard library alone.
_RUN = """
import runpy, sys
sys.path.append(sys.argv[1])
sys.argv[:] = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
QUIET: Mapping[str, str] = {"OPENAI_AGENTS_DISABLE_TRACING": "1", "LANGSMITH_TRACING": "false", "DO_NOT_TRACK": "1"}


@pytest.fixture(scope="session")
def node_modules(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the SDKs from npm, and the scripts of this folder."""
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    folder = tmp_path_factory.mktemp("node")
    packages = ("ai", "openai", "@anthropic-ai/sdk", "@ai-sdk/openai-compatible", "zod")
    npm = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(folder)]
    run([*npm, *packages], INSTALL_SECONDS)
    for script in HERE.glob("*.mjs"):
        shutil.copy(script, folder)
    return folder
