"""Whose a generation is, and what it costs its key."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any

import pytest

from frame import SamplingParams
from frame.core.config.server import ServerConfig
from frame.core.config.tree import FrameConfig
from frame.core.interfaces.errors import RequestError
from frame.core.server.generation import TimedGeneration
from frame.core.server.ingress import OUTPUTS, OWNER, REQUEST, TOKENS
from frame.core.server.keys import KeyLimits
from frame.core.server.metrics import ServerMetrics
from frame.core.server.reports import Reporter


class Streams:
    """An engine's answers: five tokens for each output, or an error."""

    def __init__(self, fault: str | None = None) -> None:
        self.fault = fault
        self.owners: list[str] = []

    async def stream(
        self, prompt: Any, params: SamplingParams, request_id: str, *, owner: str = "", adapter: str = ""
    ) -> AsyncGenerator[Any, None]:
        self.owners.append(owner)
        reason = "error" if self.fault else "stop"
        outputs = [
            SimpleNamespace(index=index, token_ids=[1] * 5, text="", finish_reason=reason, fault=self.fault, error="x")
            for index in range(params.n)
        ]
        yield SimpleNamespace(
            prompt="", prompt_token_ids=[1, 2, 3], num_cached_tokens=0, outputs=outputs, finished=True, metrics=None
        )


def generation(streams: Streams) -> TimedGeneration:
    host: Any = SimpleNamespace(
        config=FrameConfig(),
        llm=streams,
        metrics=ServerMetrics(),
        reporter=Reporter("demo"),
        client=SimpleNamespace(end=None),
    )
    return TimedGeneration(host)


async def run(made: TimedGeneration, n: int = 1) -> int:
    return len([output async for output in made.generate("p", SamplingParams(n=n), "r")])


async def test_a_key_pays_for_the_tokens_of_its_prompt_and_outputs() -> None:
    streams = Streams()
    limits = KeyLimits(ServerConfig(max_outputs_per_key=4, max_tokens_per_minute=6000))
    token = REQUEST.set({OWNER: "digest", OUTPUTS: limits, TOKENS: limits})
    try:
        assert await run(generation(streams), n=2) == 1
        assert 6000 - limits._cells[2, 0] == pytest.approx(3 + 10, abs=2)
        with pytest.raises(RequestError, match="asks for 5 more; its limit is 4") as refused:
            await run(generation(streams), n=5)
        assert refused.value.status == 429
        assert await run(generation(streams), n=4) == 1
    finally:
        REQUEST.reset(token)
    assert streams.owners == ["digest", "digest"]
    assert await run(generation(streams)) == 1
    assert streams.owners[-1] == ""


@pytest.mark.parametrize(("prompt", "tokens"), [("word " * 400, 500), ({"prompt_token_ids": [1] * 500}, 500)])
async def test_a_client_that_leaves_before_the_first_output_pays_for_its_prompt(prompt: Any, tokens: int) -> None:
    class Waits(Streams):
        async def stream(self, *given: Any, **options: Any) -> AsyncGenerator[Any, None]:
            await asyncio.sleep(60)
            yield None

    limits = KeyLimits(ServerConfig(max_tokens_per_minute=6000))
    token = REQUEST.set({OWNER: "digest", OUTPUTS: limits, TOKENS: limits})
    try:
        waiting = asyncio.ensure_future(anext(generation(Waits()).generate(prompt, SamplingParams(), "r")))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
    finally:
        REQUEST.reset(token)
    assert 6000 - limits._cells[2, 0] == pytest.approx(tokens, abs=2)


@pytest.mark.parametrize(("fault", "status"), [("request", 400), ("load", 429), ("engine", 500)])
async def test_faults_have_their_status(fault: str, status: int) -> None:
    with pytest.raises(RequestError) as raised:
        await run(generation(Streams(fault)))
    assert raised.value.status == status
