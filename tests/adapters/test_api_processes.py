"""Adapters of a server with several API processes: what one of them loads or unloads, all of them know."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.server.running import REAL, Running, server, until

from .cases import make_adapter

pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings("ignore")

#: So many connections reach both processes, but for a chance of one in 2^11.
_CONNECTIONS = 12


def listed(running: Running) -> set[tuple[str, ...]]:
    """The lists of models that the processes give."""
    answers = [httpx.get(f"{running.url}/v1/models", timeout=30).json()["data"] for _ in range(_CONNECTIONS)]
    return {tuple(sorted(card["id"] for card in answer)) for answer in answers}


def statuses(running: Running, name: str) -> set[int]:
    """What the processes answer to requests for an adapter."""
    body = {"model": name, "prompt": [5, 6], "max_tokens": 1}
    return {httpx.post(f"{running.url}/v1/completions", json=body, timeout=30).status_code for _ in range(_CONNECTIONS)}


def soon(found: Callable[[], object], wanted: object) -> None:
    """News travel through the parent, so that they may come behind the answer."""
    until(lambda: found() == wanted, 20, lambda: f"{found()} instead of {wanted}")


@pytest.mark.matrix
def test_every_api_process_knows_what_was_loaded_and_unloaded(tmp_path: Path) -> None:
    base = make_checkpoint(tmp_path / "base", "llama", tokenizer=True)
    for seed, name in enumerate(("one", "two")):
        make_adapter(base, tmp_path / "adapters" / name, seed=seed)
    folder = str(tmp_path / "adapters")
    settings = (
        "--served-model-name", "m", "--dtype", "float32", "--enable-lora", "--lora-modules", f"first={folder}/one",
        "--admin-port", "0", "--admin-key", "root", "--lora-root", folder, "--max-model-len", "128",
        "--num-gpu-blocks-override", "100", "--api-server-count", "2",
    )  # fmt: skip
    with server(REAL, str(base), *settings) as running:
        until(lambda: "admin routes at" in running.text)
        found = re.search(r"admin routes at (\S+)", running.text)
        assert found is not None
        with httpx.Client(base_url=found[1], headers={"x-api-key": "root"}, timeout=60) as admin:
            assert listed(running) == {("first", "m")}
            assert statuses(running, "first") == {200}
            answer = admin.post("/v1/load_lora_adapter", json={"lora_name": "mine", "lora_path": "two"})
            assert answer.status_code == 200, answer.text
            soon(lambda: statuses(running, "mine"), {200})
            for name in ("first", "mine"):
                assert admin.post("/v1/unload_lora_adapter", json={"lora_name": name}).status_code == 200
            soon(lambda: listed(running), {("m",)})
            assert statuses(running, "first") == statuses(running, "mine") == {404}
            assert admin.post("/v1/load_lora_adapter", json={"lora_name": "again", "lora_path": "two"}).is_success
        os.kill(running.children_named("api")[-1], signal.SIGKILL)
        until(lambda: "starting it again" in running.text and len(running.children_named("api")) == 2)
        soon(lambda: listed(running), {("again", "m")})
        assert statuses(running, "first") == {404}
