"""Two servers as the docs start them, one of which sends or writes the blocks of prompts, and who asks both at once."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.connectors.mooncake_pairs import lacks
from tests.docs.blocks import ROOT, commands, marked_file
from tests.free_ports import free_ports
from tests.routing.running import route
from tests.server.running import REAL, Running, until

PAGE = ROOT / "docs" / "prefill-decode.md"
LONG = "It was a dark and stormy night, and the rain fell in torrents. " * 6
BODY = {"prompt": LONG, "temperature": 0, "max_tokens": 12}


def start(folder: Path, connector: str) -> list[Running]:
    """Servers by the two commands of the page for a connector, D first; at ports of their own."""
    subprocess.run(["sh", "-c", marked_file(PAGE, "secret.sh")], cwd=folder, check=True)
    port = str(free_ports())
    made = []
    for line in commands(PAGE):
        if line.startswith("frame serve --port") and f" {connector} " in line:
            words = shlex.split(line.replace("8221", port))[2:]
            del words[words.index("--port") : words.index("--port") + 2]
            words += ["--plugin.mooncake.bootstrap_port", "0"] if connector == "mooncake" else []
            made.append(Running(REAL, *words, "--num-threads", "1", "--enable-prompt-tokens-details", cwd=folder))
    assert len(made) == 2
    return sorted(made, key=lambda one: "consumer" not in one.process.args)


@pytest.fixture(scope="module", params=["push", "mooncake"])
def connector(request: pytest.FixtureRequest) -> str:
    if request.param == "mooncake" and (reason := lacks()) is not None:
        pytest.skip(reason)
    return str(request.param)


@pytest.fixture(scope="module")
def servers(connector: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Running]]:
    made = start(tmp_path_factory.mktemp("pushed"), connector)
    try:
        for one in made:
            one.wait_ready()
        yield made
    finally:
        for one in made:
            one.stop()


def post(server: Running, body: dict[str, Any], **params: Any) -> dict[str, Any]:
    whole = {**body, "kv_transfer_params": params} if params else body
    answer = httpx.post(f"{server.url}/v1/completions", json=whole, timeout=60)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def text(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["text"])


def alone(server: Running, body: dict[str, Any]) -> str:
    return text(post(server, {**body, "cache_salt": "alone"}))


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.some(1)
def test_one_after_the_other(servers: list[Running], connector: str) -> None:
    decode, prefill = servers
    params = post(prefill, {**BODY, "max_tokens": 1}, do_remote_decode=True)["kv_transfer_params"]
    answer = post(decode, BODY, **params)
    assert cached(answer) > 0
    assert text(answer) == alone(decode, BODY)
    until(lambda: prefill.metric(f"frame_kv_connector_{connector}_held_blocks") == 0, 20, lambda: prefill.text)


def test_both_at_once(servers: list[Running]) -> None:
    decode, prefill = servers
    asked_at = re.search(r"prompts may be asked for at (\S+)", prefill.text)
    found = {"remote_bootstrap_addr": asked_at[1]} if asked_at else {}
    body = {**BODY, "prompt": f"At once. {LONG}"}
    with ThreadPoolExecutor(1) as other:
        asked = other.submit(post, decode, body, do_remote_prefill=True, **found)
        post(prefill, {**body, "max_tokens": 1}, do_remote_decode=True)
        answer = asked.result()
    assert cached(answer) > 0
    assert text(answer) == alone(decode, body)


def test_through_a_front(servers: list[Running], connector: str) -> None:
    decode, prefill = servers
    name = f"frame_kv_connector_{connector}_loaded_blocks_total"
    body = {**BODY, "prompt": f"Through a front. {LONG}", "n": 2}
    before = decode.metric(name)
    with route(decode.url, "--prefill", prefill.url) as front:
        answer = httpx.post(f"{front.url}/v1/completions", json=body, timeout=60).json()
    assert {choice["text"] for choice in answer["choices"]} == {alone(decode, body)}
    assert decode.metric(name) > before


def test_a_prefill_server_that_is_killed_costs_no_request(servers: list[Running]) -> None:
    decode, prefill = servers
    body = {**BODY, "prompt": f"The last one. {LONG}"}
    params = post(prefill, {**body, "max_tokens": 1}, do_remote_decode=True)["kv_transfer_params"]
    for pid in (prefill.children()["engine"], prefill.process.pid):
        subprocess.run(["kill", "-9", str(pid)], check=True)
    prefill.process.wait()
    assert text(post(decode, body, **params)) == alone(decode, body)
    late = {**BODY, "prompt": f"After. {LONG}"}
    assert text(post(decode, late, **params)) == alone(decode, late)
