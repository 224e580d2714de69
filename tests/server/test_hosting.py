"""What operators of shared and hosted servers ask for.

API keys that share no cached prefix, the one route of SageMaker, settings of the tokenizer, reports of the load.
"""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import httpx
import pytest
from anthropic import Anthropic
from openai import OpenAI
from pydantic import ValidationError

from frame.core.config.checkpoint import DEMO_FOLDER
from frame.core.config.server import ServerConfig
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.engine import EngineStats
from frame.core.server.app import build_app
from frame.core.server.generation import key_salt
from frame.plugins.endpoints.completions import CompletionsEndpoint
from frame.plugins.endpoints.invocations import InvocationsEndpoint
from frame.plugins.endpoints.load_report import RecentStats
from frame.plugins.endpoints.models import ModelsEndpoint
from frame.plugins.endpoints.server import ServerEndpoint
from frame.plugins.endpoints.tokens import TokensEndpoint
from frame.testing import make_setup
from frame.testing.fake_serving import FakeServing
from tests.server.running import FAKE, Running, server, until

KEYS = ("first", "second")
LONG = "it was a dark and stormy night"


@pytest.fixture(scope="module")
def running() -> Iterator[Running]:
    with server(
        FAKE, "--api-key", KEYS[0], "--api-key", KEYS[1], "--cache-salt-per-key", "--enable-prompt-tokens-details",
        "--plugin.fake.caches", "true", "--plugin.fake.vocab_size", "2048", "--enable-tokenizer-info-endpoint",
        "--return-tokens-as-token-ids", "--admin-port", "0", "--admin-key", "root", "--rpc-methods", "nap",
        "--public-metrics",
    ) as running:  # fmt: skip
        yield running


def cached(usage: Any) -> int:
    details = usage.prompt_tokens_details
    assert details is not None
    return int(details.cached_tokens)


def completion(url: str, key: str, **fields: Any) -> int:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        answer = client.completions.create(model="demo", prompt=f"One: {LONG}", max_tokens=1, **fields)
    return cached(answer.usage)


def chat(url: str, key: str, **fields: Any) -> int:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": f"Two: {LONG}"}]
        answer = client.chat.completions.create(model="demo", messages=messages, max_tokens=1, **fields)
    return cached(answer.usage)


def response(url: str, key: str) -> int:
    with OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        answer = client.responses.create(model="demo", input=f"Three: {LONG}", max_output_tokens=1)
    assert answer.usage is not None
    return answer.usage.input_tokens_details.cached_tokens


def message(url: str, key: str) -> int:
    with Anthropic(base_url=url, api_key=key, max_retries=0) as client:
        messages: Any = [{"role": "user", "content": f"Four: {LONG}"}]
        answer = client.messages.create(model="demo", max_tokens=1, messages=messages)
    return answer.usage.cache_read_input_tokens or 0


@pytest.mark.parametrize("ask", [completion, chat, response, message], ids=lambda ask: str(ask.__name__))
def test_no_key_finds_what_another_has_sent(running: Running, ask: Callable[[str, str], int]) -> None:
    first, second = KEYS
    ask(running.url, first)
    shared = ask(running.url, first)
    assert shared > 0
    assert ask(running.url, second) == 0
    assert ask(running.url, second) == shared


def test_a_salt_of_the_request_counts_within_its_key(running: Running) -> None:
    extra = {"cache_salt": "mine"}
    assert completion(running.url, KEYS[0], extra_body=extra) == 0
    assert completion(running.url, KEYS[0], extra_body=extra) > 0
    assert completion(running.url, KEYS[1], extra_body=extra) == 0


def test_salts_differ_by_key_and_by_what_is_asked_for() -> None:
    salts = [key_salt(owner, given) for owner in ("a", "b", "") for given in (None, "", "a", "b")]
    assert len(set(salts)) == len(salts)
    assert key_salt("a", "b") == key_salt("a", "b")
    assert key_salt("a", None) == "77825e0ce18f82bfd60180c391b9c48c9204476eb7998b595ddda99ca23a188b"


def test_it_needs_keys() -> None:
    with pytest.raises(ValidationError, match="cache_salt_per_key needs api_key"):
        ServerConfig(cache_salt_per_key=True)


def ask(running: Running, path: str, body: Any, **headers: str) -> httpx.Response:
    return httpx.post(running.url + path, json=body, headers={"x-api-key": KEYS[0], **headers}, timeout=60)


def without_names(answer: httpx.Response) -> dict[str, Any]:
    assert answer.status_code == 200, answer.text
    return {name: value for name, value in answer.json().items() if name not in ("id", "created", "usage")}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}),
        ("/v1/completions", {"prompt": "Hello", "max_tokens": 4, "echo": True}),
    ],
    ids=["chat", "completion"],
)
def test_invocations_answer_as_the_route_that_is_meant(running: Running, path: str, body: dict[str, Any]) -> None:
    assert without_names(ask(running, "/invocations", body)) == without_names(ask(running, path, body))
    lines = ask(running, "/invocations", {**body, "stream": True}).text.splitlines()
    assert lines[-2] == "data: [DONE]"
    assert json.loads(lines[0].removeprefix("data: "))["object"] in ("chat.completion.chunk", "text_completion")


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"model": "demo"}, "is for no route"),
        ({"prompt": None}, "is for no route"),
        ({"prompt": "x", "temperature": -1}, "temperature must be"),
        ({"messages": [], "max_tokens": 1}, "messages must"),
        ({"input": "x"}, "generates"),
        ([1], "JSON object"),
    ],
    ids=str,
)
def test_invocations_that_are_wrong_say_what_is(running: Running, body: Any, said: str) -> None:
    answer = ask(running, "/invocations", body)
    assert answer.status_code == 400, answer.text
    assert said in answer.json()["error"]["message"]


def test_lines_of_batches_may_be_invocations() -> None:
    config, serving = FrameConfig(), cast(Any, FakeServing())
    build_app(
        config,
        serving,
        [
            kind(make_setup("endpoint", config=config, serving=serving))
            for kind in (CompletionsEndpoint, InvocationsEndpoint)
        ],
    )
    answer = asyncio.run(serving.calls.post("/invocations", {"prompt": "x"}, ""))
    assert (answer.status, answer.body["object"]) == (200, "text_completion")


def test_invocations_need_a_key(running: Running) -> None:
    assert ask(running, "/invocations", {"prompt": "x"}, **{"x-api-key": "wrong"}).status_code == 401


def test_the_settings_of_the_tokenizer(running: Running) -> None:
    answer = httpx.get(f"{running.url}/tokenizer_info", headers={"x-api-key": KEYS[0]})
    assert answer.status_code == 200
    info = answer.json()
    assert info["tokenizer_class"] in ("PreTrainedTokenizerFast", "TokenizersBackend")
    assert info["eos_token"]["content"] == "<|end|>"
    assert info["added_tokens_decoder"]["0"]["content"] == "<|begin|>"
    assert "messages" in info["chat_template"]
    assert str(DEMO_FOLDER.resolve().parent) not in answer.text
    assert not {"name_or_path", "vocab_file"} & set(info)
    assert httpx.get(f"{running.url}/tokenizer_info").status_code == 401


def test_they_are_told_only_when_that_is_set() -> None:
    router = TokensEndpoint(make_setup("endpoint", serving=FakeServing())).router()
    assert "/tokenizer_info" not in {getattr(route, "path", "") for route in router.routes}


def test_load_reports_are_headers_in_the_form_that_is_asked_for(running: Running) -> None:
    body = {"prompt": "x", "max_tokens": 2}
    named = "endpoint-load-metrics-format"
    report = ask(running, "/v1/completions", body, **{named: "json"}).headers["endpoint-load-metrics"]
    assert report.startswith("JSON ")
    metrics = json.loads(report.removeprefix("JSON "))["named_metrics"]
    assert set(metrics) == {"kv_cache_usage_perc", "num_requests_running", "num_requests_waiting"}
    report = ask(running, "/v1/completions", {**body, "stream": True}, **{named: "TEXT"}).headers[
        "endpoint-load-metrics"
    ]
    assert re.fullmatch(r"TEXT (named_metrics\.\w+=[\d.]+(, )?){3}", report)
    for headers in ({}, {named: "XML"}):
        assert "endpoint-load-metrics" not in ask(running, "/v1/completions", body, **headers).headers
    refused = ask(running, "/v1/completions", body, **{named: "TEXT", "x-api-key": "wrong"})
    assert "endpoint-load-metrics" not in refused.headers


class CountingServing(FakeServing):
    """Counts the questions that the engine is asked."""

    asked = 0

    async def stats(self) -> EngineStats:
        self.asked += 1
        return EngineStats(running=self.asked)


def test_load_reports_are_for_those_whose_key_was_checked() -> None:
    key, open_server = {"x-api-key": "k"}, dict[str, Any]()
    keyed = {"api_key": ["k"], "public_metrics": True}
    for settings, method, path, headers, reported in (
        (keyed, "GET", "/health", {}, False),
        (keyed, "GET", "/ping", key, False),
        (keyed, "GET", "/metrics", {}, False),
        (keyed, "OPTIONS", "/v1/models", {}, False),
        (keyed, "GET", "/v1/models", {}, False),
        (keyed, "GET", "/v1/models", key, True),
        (keyed, "GET", "/metrics", key, True),
        (open_server, "GET", "/health", {}, False),
        (open_server, "GET", "/v1/models", {}, True),
    ):
        config, serving = FrameConfig.from_flat(**settings), cast(Any, CountingServing())
        kinds = (ModelsEndpoint, ServerEndpoint)
        app, _ = build_app(
            config, serving, [kind(make_setup("endpoint", config=config, serving=serving)) for kind in kinds]
        )
        before = serving.asked

        async def send(app: Any = app, method: str = method, path: str = path, own: Any = headers) -> httpx.Response:
            async with httpx.AsyncClient(transport=httpx.ASGITransport(app=app), base_url="http://test") as client:
                return await client.request(method, path, headers={**own, "endpoint-load-metrics-format": "TEXT"})

        answer = asyncio.run(send())
        assert ("endpoint-load-metrics" in answer.headers) == reported, (settings, method, path)
        if not reported and path != "/metrics":  # which asks for itself
            assert serving.asked == before


def test_reports_of_the_same_moment_are_one_question() -> None:
    async def ask_together() -> None:
        go, serving = asyncio.Event(), CountingServing()

        async def slow() -> EngineStats:
            await go.wait()
            return await serving.stats()

        recent = RecentStats(slow, seconds=3600)
        asking = [asyncio.create_task(recent()) for _ in range(5)]
        await asyncio.sleep(0)
        asking.pop(0).cancel()  # the client that was first leaves
        go.set()
        assert [stats.running for stats in await asyncio.gather(*asking)] == [1] * 4
        assert (await recent()).running == 1
        anew = RecentStats(slow, seconds=0)
        assert [(await anew()).running for _ in range(2)] == [2, 3]

    asyncio.run(ask_together())


@pytest.mark.matrix
def test_admin_requests_end_in_their_time_and_the_engine_goes_on(running: Running) -> None:
    until(lambda: "admin routes at" in running.text)
    found = re.search(r"admin routes at (\S+)", running.text)
    assert found is not None
    with httpx.Client(base_url=found.group(1), headers={"x-api-key": "root"}, timeout=60) as admin:
        begun = time.monotonic()
        body = {"method": "nap", "kwargs": {"seconds": 10}}
        late = admin.post("/collective_rpc", json={**body, "timeout": 0.2})
        assert late.status_code == 504, late.text
        assert time.monotonic() - begun < 10
        assert late.json()["error"]["code"] == "deadline_exceeded"
        assert "within its 0.2 seconds" in late.json()["error"]["message"]
        answer = admin.post("/collective_rpc", json={"method": "nap", "timeout": 60})  # after the one that goes on
        assert answer.json() == {"results": ["nap"]}
    assert ask(running, "/v1/completions", {"prompt": "x", "max_tokens": 1}).status_code == 200


def test_metrics_may_be_public(running: Running) -> None:
    assert httpx.get(f"{running.url}/metrics").status_code == 200
    assert httpx.get(f"{running.url}/stats").status_code == 401


def test_tokens_are_shown_as_ids_where_the_server_says_so(running: Running) -> None:
    body = {"prompt": [5, 6], "max_tokens": 2, "logprobs": 1}
    logprobs = ask(running, "/v1/completions", body).json()["choices"][0]["logprobs"]
    assert logprobs["tokens"] == ["token_id:5", "token_id:6"]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "logprobs": True}
    (entry,) = ask(running, "/v1/chat/completions", chat).json()["choices"][0]["logprobs"]["content"]
    assert entry["token"].startswith("token_id:")
