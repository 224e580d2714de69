"""Two servers as the docs start them, and a proxy that sends what proxies for prefill and decode send."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from frame.testing.checkpoints import make_checkpoint
from tests.docs.blocks import ROOT, commands, marked_file
from tests.routing.running import route
from tests.server.running import REAL, Running, until

pytest.importorskip("nixl")

PAGE = ROOT / "docs" / "prefill-decode.md"
LONG = "It was a dark and stormy night, and the rain fell in torrents. " * 6
GREEDY = {"temperature": 0, "max_tokens": 12}


class Proxy:
    """Takes a client's body to the prefill server, and with its parameters to the decode server, one after the other.

    The bodies are those of the proxies for vLLM's connector: `stream` off and one token for the first, the parameters
    untouched for the second. Without parameters the second gets the client's body.
    """

    def __init__(self, prefill: Running, decode: Running) -> None:
        self.prefill, self.decode = prefill, decode
        self.params: dict[str, Any] | None = None

    def first(self, path: str, body: dict[str, Any], name: str) -> dict[str, Any] | None:
        asks = {
            **{key: value for key, value in body.items() if key not in ("stream_options", "min_tokens")},
            "stream": False,
            "max_tokens": 1,
            "kv_transfer_params": {
                "do_remote_decode": True,
                "do_remote_prefill": False,
                "remote_engine_id": None,
                "remote_block_ids": None,
                "remote_host": None,
                "remote_port": None,
            },
        }
        if "max_completion_tokens" in asks:
            asks["max_completion_tokens"] = 1
        try:
            answer = httpx.post(self.prefill.url + path, json=asks, headers={"X-Request-Id": name}, timeout=60)
        except httpx.HTTPError:
            return None
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] | None = answer.json().get("kv_transfer_params")
        return found

    def send(self, path: str, body: dict[str, Any]) -> httpx.Response:
        name = str(uuid.uuid4())
        self.params = self.first(path, body, name)
        return self.second(path, body, name, self.params)

    def second(self, path: str, body: dict[str, Any], name: str, params: dict[str, Any] | None) -> httpx.Response:
        whole = body if params is None else {**body, "kv_transfer_params": params}
        answer = httpx.post(self.decode.url + path, json=whole, headers={"X-Request-Id": name}, timeout=60)
        assert answer.status_code == 200, answer.text
        return answer


def start(folder: Path) -> list[Running]:
    """Servers by the two commands of the page for nixl, in a folder with the secret of its first example."""
    subprocess.run(["sh", "-c", marked_file(PAGE, "secret.sh")], cwd=folder, check=True)
    lines = [
        shlex.split(line)[2:] for line in commands(PAGE) if line.startswith("frame serve --port") and " nixl " in line
    ]
    assert len(lines) == 2
    made = []
    for words in lines:
        place = words.index("--port")
        del words[place : place + 2]
        made.append(Running(REAL, *words, "--num-threads", "1", "--enable-prompt-tokens-details", cwd=folder))
    return made


@pytest.fixture(scope="module")
def proxy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Proxy]:
    made = start(tmp_path_factory.mktemp("apart"))
    try:
        for one in made:
            one.wait_ready()
        yield Proxy(*made)
    finally:
        for one in made:
            one.stop()


def cached(answer: httpx.Response) -> int:
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


def loaded(proxy: Proxy) -> float:
    try:
        return proxy.decode.metric("frame_kv_connector_nixl_loaded_blocks_total")
    except AssertionError:
        return 0.0


def at_rest(proxy: Proxy) -> None:
    until(lambda: proxy.prefill.metric("frame_kv_connector_nixl_held_blocks") == 0, 20, lambda: proxy.prefill.text)


@pytest.mark.matrix
def test_the_example_of_the_page_answers(proxy: Proxy, tmp_path: Path) -> None:
    code = marked_file(PAGE, "apart.py")
    for port, one in (("8100", proxy.prefill), ("8200", proxy.decode)):
        code = code.replace(f"http://127.0.0.1:{port}", one.url)
    (tmp_path / "apart.py").write_text(code)
    before = loaded(proxy)
    done = subprocess.run([sys.executable, "apart.py"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
    assert loaded(proxy) == before + 6  # as the page says
    at_rest(proxy)


def test_completions_and_chats_are_those_of_one_server(proxy: Proxy) -> None:
    chat = {"messages": [{"role": "user", "content": LONG + "Hello?"}], "max_completion_tokens": 12, "temperature": 0}
    for path, body in (("/v1/completions", {"prompt": LONG, **GREEDY}), ("/v1/chat/completions", chat)):
        answer = proxy.send(path, body)
        assert proxy.params is not None
        assert proxy.params["do_remote_prefill"] is True
        assert cached(answer) > 0
        alone = httpx.post(proxy.prefill.url + path, json={**body, "cache_salt": "alone"}, timeout=60).json()
        for one in (mine := answer.json(), alone):
            one["choices"][0].pop("kv_transfer_params", None)
        assert mine["choices"] == alone["choices"]
    at_rest(proxy)


def test_a_stream_is_that_of_one_server(proxy: Proxy) -> None:
    body = {"prompt": "Once upon a time. " + LONG, **GREEDY}
    before = loaded(proxy)
    answer = proxy.send("/v1/completions", {**body, "stream": True, "stream_options": {"include_usage": True}})
    chunks = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    text = "".join(choice["text"] for chunk in chunks for choice in chunk["choices"])
    alone = httpx.post(proxy.prefill.url + "/v1/completions", json={**body, "cache_salt": "alone"}, timeout=60)
    assert text == alone.json()["choices"][0]["text"]
    assert loaded(proxy) > before
    at_rest(proxy)


@pytest.mark.some(1)
@pytest.mark.parametrize("more", [{}, {"n": 3}])
def test_a_front_has_the_second_read_what_the_first_computed(proxy: Proxy, more: dict[str, Any]) -> None:
    body = {"prompt": f"Through a front, {more}. {LONG}", **GREEDY, **more}
    before = loaded(proxy)
    with route(proxy.decode.url, "--prefill", proxy.prefill.url) as front:
        answer = httpx.post(front.url + "/v1/completions", json=body, timeout=60)
        servers = httpx.get(f"{front.url}/fleet").json()["servers"]
    alone = httpx.post(proxy.prefill.url + "/v1/completions", json={**body, "cache_salt": "alone"}, timeout=60)
    texts = [[choice["text"] for choice in one.json()["choices"]] for one in (answer, alone)]
    assert texts[0] == texts[1]
    assert [server["prefills"] for server in servers] == [0, 1]
    assert loaded(proxy) > before
    at_rest(proxy)


def test_several_outputs_read_once(proxy: Proxy) -> None:
    body = {"prompt": "Several of them. " + LONG, **GREEDY}
    name, params = "several", proxy.first("/v1/completions", body, "several")
    before = loaded(proxy)
    answer = proxy.second("/v1/completions", {**body, "n": 3}, name, params)
    assert len({choice["text"] for choice in answer.json()["choices"]}) == 1
    assert params is not None
    assert 0 < loaded(proxy) - before <= sum(map(len, params["remote_block_ids"]))
    at_rest(proxy)


def test_a_short_prompt_and_parameters_of_nobody_are_computed(proxy: Proxy) -> None:
    answer = proxy.send("/v1/completions", {"prompt": "Hi", **GREEDY})
    assert proxy.params is None
    body = {"prompt": "Nobody's. " + LONG, **GREEDY}
    made_up = {
        "do_remote_prefill": True,
        "do_remote_decode": False,
        "remote_block_ids": [[1, 2, 3]],
        "remote_engine_id": "nobody",
        "remote_request_id": "x",
        "remote_host": "127.0.0.1",
        "remote_port": 9,
        "tp_size": 1,
    }
    answer = proxy.second("/v1/completions", body, "x", made_up)
    assert cached(answer) == 0
    both = {**body, "kv_transfer_params": {"do_remote_prefill": True, "do_remote_decode": True}}
    assert httpx.post(proxy.decode.url + "/v1/completions", json=both, timeout=60).status_code == 400


def test_the_metrics_and_lines_of_the_page_are_there(proxy: Proxy) -> None:
    proxy.send("/v1/completions", {"prompt": LONG + "What is named on the page?", **GREEDY})
    named = set(re.findall(r"`(frame_kv_tier_\w+)`", PAGE.read_text(encoding="utf-8")))
    seldom = {"frame_kv_tier_failed_blocks_total"}
    assert len(named) == 5
    assert seldom < named
    there = set[str]()
    for one in (proxy.prefill, proxy.decode):
        text = httpx.get(f"{one.url}/metrics").text
        there |= set(re.findall(r'^(frame_kv_tier_\w+)\{[^}]*connector="nixl"', text, re.MULTILINE))
    assert named - seldom <= there
    proxy.prefill.until_said("nixl connector: KV blocks may be read from 127.0.0.1:")
    proxy.decode.until_said("nixl connector: KV blocks are read from 127.0.0.1")


def test_a_prefill_server_that_is_killed_costs_no_request(proxy: Proxy) -> None:
    body = {"prompt": "The last one. " + LONG, **GREEDY}
    params = proxy.first("/v1/completions", body, "last")
    assert params is not None
    for pid in (proxy.prefill.children()["engine"], proxy.prefill.process.pid):
        subprocess.run(["kill", "-9", str(pid)], check=True)
    proxy.prefill.process.wait()
    answer = proxy.second("/v1/completions", body, "last", params)
    assert answer.json()["choices"][0]["text"]
    assert cached(answer) == 0
    assert proxy.send("/v1/completions", {**body, "prompt": "After. " + LONG}).json()["choices"][0]["text"]


@pytest.mark.matrix
def test_decode_ranks_that_share_experts_read_what_a_server_computed(tmp_path: Path) -> None:
    """As wide expert parallelism is served: the engines of the second server have one mesh, and each its own blocks."""
    model, secret = make_checkpoint(tmp_path, "mixtral", tokenizer=True), tmp_path / "secret"
    secret.write_text("0123456789abcdef" * 2)
    shared = (str(model), "--kv-connector", "nixl", "--plugin.nixl.secret_file", str(secret), "--num-threads", "1")
    made = [Running(REAL, *shared), Running(REAL, *shared, "--data-parallel-size", "2", "--enable-expert-parallel")]
    try:
        for one in made:
            one.wait_ready()
        pair, name = Proxy(*made), model.name
        for number in range(4):
            body = {"model": name, "prompt": [7 + number, *range(20, 80)], **GREEDY}
            pair.params = pair.first("/v1/completions", body, str(number))
            whole = {**body, "kv_transfer_params": pair.params}
            headers = {"X-data-parallel-rank": str(number % 2)}
            answer = httpx.post(pair.decode.url + "/v1/completions", json=whole, headers=headers, timeout=60).json()
            alone = httpx.post(pair.prefill.url + "/v1/completions", json=body, timeout=60).json()
            assert answer["choices"][0]["text"] == alone["choices"][0]["text"]
        text = httpx.get(pair.decode.url + "/metrics", timeout=60).text
        loads = re.findall(r'^frame_kv_connector_nixl_loaded_blocks_total{engine="(.)".*} (\S+)$', text, re.M)
        assert sorted((rank, float(count) > 0) for rank, count in loads) == [("0", True), ("1", True)]
    finally:
        for one in made:
            one.stop()
