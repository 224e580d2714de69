"""Every route that an official SDK speaks, by its synchronous and its asynchronous client, which check each answer.

The clients run in their strict mode: an answer or event that is not of the SDK's own type is an error.
"""

from __future__ import annotations

import inspect
import io
import json
from collections.abc import AsyncIterator, Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.server.running import FAKE, Running, server

KEY = "sesame"
CHAT: list[Any] = [{"role": "user", "content": "Hello there!"}]
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": {"messages": CHAT, "max_tokens": 2}}


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = str(tmp_path_factory.mktemp("batches"))
    with server(
        FAKE, "--plugin.fake.delay", "0.002", "--plugin.fake.vocab_size", "2048", "--disable-access-log",
        "--api-key", KEY, "--plugin.batches.folder", folder,
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(params=[openai.OpenAI, openai.AsyncOpenAI], ids=["sync", "async"])
async def client(request: pytest.FixtureRequest, running: Running) -> AsyncIterator[Any]:
    url = f"{running.url}/v1"
    made = request.param(base_url=url, api_key=KEY, max_retries=0, _strict_response_validation=True)
    yield made
    await said(made.close())


@pytest.fixture(params=[anthropic.Anthropic, anthropic.AsyncAnthropic], ids=["sync", "async"])
async def claude(request: pytest.FixtureRequest, running: Running) -> AsyncIterator[Any]:
    made = request.param(base_url=running.url, api_key=KEY, max_retries=0, _strict_response_validation=True)
    yield made
    await said(made.close())


async def said(answer: Any) -> Any:
    """What either client answers."""
    return await answer if inspect.isawaitable(answer) else answer


async def events(stream: Any) -> list[Any]:
    """All events that either client streams."""
    stream = await said(stream)
    if hasattr(stream, "__aiter__"):
        return [event async for event in stream]
    return list(stream)


async def everything(page: Any) -> list[Any]:
    """All items of a list, over its pages."""
    if hasattr(page, "__aiter__"):
        return [item async for item in page]
    return list(page)


async def test_models(client: Any, claude: Any) -> None:
    assert [model.id for model in await everything(client.models.list())] == ["demo"]
    assert (await said(client.models.retrieve("demo"))).owned_by
    assert [model.id for model in await everything(claude.models.list())] == ["demo"]
    assert (await said(claude.models.retrieve("demo"))).display_name
    with pytest.raises(openai.NotFoundError):
        await said(client.models.retrieve("none"))
    with pytest.raises(anthropic.NotFoundError):
        await said(claude.models.retrieve("none"))


async def test_completions(client: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "prompt": ["Hello", "there"], "max_tokens": 6, "n": 2, "logprobs": 2}
    whole = await said(client.completions.create(**ask))
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3]
    # its type knows no chunk before the last of a choice, which OpenAI's own streams have
    client._strict_response_validation = False
    chunks = await events(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    texts = ["", "", "", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]
    assert chunks[-1].usage == whole.usage


async def test_chat_completions(client: Any) -> None:
    ask: dict[str, Any] = {
        "model": "demo",
        "messages": CHAT,
        "max_tokens": 6,
        "n": 2,
        "logprobs": True,
        "top_logprobs": 2,
    }
    whole = await said(client.chat.completions.create(**ask))
    chunks = await events(client.chat.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [choice.message.content for choice in whole.choices]
    assert chunks[-1].usage == whole.usage


async def test_responses(client: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "input": "Hello", "max_output_tokens": 40}
    whole = await said(client.responses.create(**ask))
    found = await events(client.responses.create(**ask, stream=True))
    assert [event.sequence_number for event in found] == list(range(len(found)))
    assert found[-1].response.output_text == whole.output_text
    assert (await said(client.responses.retrieve(whole.id))).output_text == whole.output_text
    then = await said(client.responses.create(**ask, previous_response_id=whole.id))
    assert then.usage.input_tokens > whole.usage.input_tokens
    assert [item.type for item in await everything(client.responses.input_items.list(then.id))]
    count = await said(client.responses.input_tokens.count(model="demo", input="Hello"))
    assert count.input_tokens == whole.usage.input_tokens
    await said(client.responses.delete(whole.id))
    with pytest.raises(openai.NotFoundError):
        await said(client.responses.retrieve(whole.id))


async def test_responses_in_the_background(client: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "input": "Hello", "background": True, "max_output_tokens": 300}
    slow = {"extra_args": {"fault": "slow"}}  # some 15 s
    begun = await said(client.responses.create(**ask, extra_body=slow))
    assert begun.status in ("queued", "in_progress")
    assert (await said(client.responses.cancel(begun.id))).status == "cancelled"
    begun = await said(client.responses.create(**{**ask, "max_output_tokens": 20}))
    last = (await events(client.responses.retrieve(begun.id, stream=True)))[-1]
    assert last.response.id == begun.id
    assert (await said(client.responses.retrieve(begun.id))).status in ("completed", "incomplete")


async def test_files_and_batches(client: Any) -> None:
    data = json.dumps(LINE).encode()
    file = await said(client.files.create(file=("in.jsonl", io.BytesIO(data)), purpose="batch"))
    assert (await said(client.files.retrieve(file.id))).bytes == len(data)
    assert (await said(client.files.content(file.id))).read() == data
    assert file.id in [each.id for each in await everything(client.files.list())]
    ask = {"endpoint": LINE["url"], "completion_window": "24h"}
    batch = await said(client.batches.create(input_file_id=file.id, **ask))
    assert (await said(client.batches.retrieve(batch.id))).id == batch.id
    assert batch.id in [each.id for each in await everything(client.batches.list())]
    other = await said(client.batches.create(input_file_id=file.id, **ask))
    assert (await said(client.batches.cancel(other.id))).status in (
        "cancelling",
        "cancelled",
        "completed",
        "finalizing",
    )
    assert (await said(client.files.delete(file.id))).deleted


async def test_messages(claude: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "messages": CHAT, "max_tokens": 12}
    whole = await said(claude.messages.create(**ask))
    found = await events(claude.messages.create(**ask, stream=True))
    assert [found[0].type, found[-1].type] == ["message_start", "message_stop"]
    text = "".join(event.delta.text for event in found if event.type == "content_block_delta")
    assert [text] == [block.text for block in whole.content]
    count = await said(claude.messages.count_tokens(model="demo", messages=CHAT))
    assert count.input_tokens == whole.usage.input_tokens


async def test_errors_are_the_sdks_own(client: Any, claude: Any) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        await said(client.chat.completions.create(model="demo", messages=CHAT, temperature=-1))
    assert (refused.value.param, refused.value.type) == ("temperature", "invalid_request_error")
    with pytest.raises(anthropic.BadRequestError) as rejected:
        await said(claude.messages.create(model="demo", messages=CHAT, max_tokens=-4))
    assert rejected.value.body["error"]["type"] == "invalid_request_error"
    for made, error in ((client, openai.AuthenticationError), (claude, anthropic.AuthenticationError)):
        with pytest.raises(error):
            await said(made.with_options(api_key="wrong").models.retrieve("demo"))
