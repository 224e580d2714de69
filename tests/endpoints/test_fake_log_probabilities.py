"""The fake host of endpoint suites answers with log-probabilities, so that other endpoints can be tested with them."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import httpx
import pytest

from frame.core.config.tree import FrameConfig
from frame.core.server.app import build_app
from frame.plugins.endpoints.chat import ChatEndpoint
from frame.plugins.endpoints.completions import CompletionsEndpoint
from frame.testing import make_setup
from frame.testing.fake_serving import FakeServing


def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
    config, serving = FrameConfig(), cast(Any, FakeServing("ab c"))
    setup = make_setup("endpoint", config=config, serving=serving)
    app, _ = build_app(config, serving, [ChatEndpoint(setup), CompletionsEndpoint(setup)])

    async def send() -> httpx.Response:
        transport = httpx.ASGITransport(app=cast(Any, app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.post(path, json=body)

    answer = asyncio.run(send())
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()["choices"][0]
    return found


@pytest.mark.parametrize("count", [0, 2])
def test_a_completion_and_its_prompt(count: int) -> None:
    choice = ask("/v1/completions", {"prompt": "x", "logprobs": count, "prompt_logprobs": 1, "n": 2})
    assert choice["logprobs"]["tokens"] == ["a", "b", " ", "c"]
    assert choice["logprobs"]["token_logprobs"] == [-0.5] * 4
    assert [len(each) for each in choice["logprobs"]["top_logprobs"]] == [count] * 4
    assert [each and len(each) for each in choice["prompt_logprobs"]] == [None, 1, 1]


def test_a_chat() -> None:
    messages = [{"role": "user", "content": "x"}]
    choice = ask("/v1/chat/completions", {"messages": messages, "logprobs": True, "top_logprobs": 2})
    first = choice["logprobs"]["content"][0]
    assert (first["token"], first["logprob"]) == ("a", -0.5)
    assert [(each["token"], each["logprob"]) for each in first["top_logprobs"]] == [("a", -0.5), ("b", -1.5)]
    assert ask("/v1/chat/completions", {"messages": messages})["logprobs"] is None
