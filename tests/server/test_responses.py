"""The Responses API through the OpenAI client, against a real server whose engine says what it is told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from tests.server.running import FAKE, Running, server, until

EVENTS: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
KEY, OTHER = "sesame", "poppy"
TOOL: Any = {
    "type": "function", "name": "weather", "description": "Tells the weather.", "strict": False,
    "parameters": {"type": "object", "properties": {"city": {"type": "string"}}},
}  # fmt: skip
MCP: Any = {"type": "mcp", "server_label": "calc", "require_approval": "never"}


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


SAID = f"<think>\nLet me see.\n</think>\n\nI will look.\n{call('weather', city='Paris')}"


@pytest.fixture(scope="module")
def tool_server() -> Iterator[str]:
    script = str(Path(__file__).with_name("mcp_tools.py"))
    command = [sys.executable, script]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().strip()
        finally:
            process.kill()


@pytest.fixture(scope="module")
def running(tool_server: str) -> Iterator[Running]:
    with server(
        FAKE, "--plugin.fake.delay", "0.002", "--plugin.fake.vocab_size", "2048", "--disable-access-log",
        "--api-key", KEY, OTHER, "--enable-auto-tool-choice", "--tool-call-parser", "hermes",
        "--reasoning-parser", "qwen3", "--tool-server", f"calc={tool_server}", "gone=http://127.0.0.1:9/mcp",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(running: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def says(running: Running) -> Any:
    def body(text: str) -> dict[str, Any]:
        fields = {"prompt": text, "add_special_tokens": False}
        response = httpx.post(f"{running.url}/tokenize", json=fields, headers={"x-api-key": KEY})
        return {"extra_args": {"answer": response.json()["tokens"]}}

    return body


def strict(response: Response) -> Response:
    return Response.model_validate(response.to_dict())


def checked(events: Any) -> list[Any]:
    """All events, each of the SDK's type for it, numbered without a gap."""
    found = list(events)
    for number, event in enumerate(found):
        EVENTS.validate_python(event.to_dict())
        assert event.sequence_number == number
    return found


def kinds_of(response: Response) -> list[str]:
    return [item.type for item in response.output]


def test_a_response(client: openai.OpenAI, says: Any) -> None:
    response = client.responses.create(
        model="demo", input="Hello there", metadata={"a": "b"}, max_output_tokens=50, extra_body=says("Good day.")
    )
    strict(response)
    assert response.output_text == "Good day."
    assert (response.status, response.error, response.metadata) == ("completed", None, {"a": "b"})
    assert response.usage is not None
    assert response.usage.total_tokens == response.usage.input_tokens + response.usage.output_tokens
    assert strict(client.responses.retrieve(response.id)) == strict(response)
    items = client.responses.input_items.list(response.id).data
    assert [item.type for item in items] == ["message"]
    count = client.responses.input_tokens.count(model="demo", input="Hello there")
    assert count.input_tokens == response.usage.input_tokens
    client.responses.delete(response.id)
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_a_stream_is_the_same_response(client: openai.OpenAI, says: Any) -> None:
    ask: dict[str, Any] = {"model": "demo", "input": "Hi", "tools": [TOOL], "extra_body": says(SAID)}
    whole = client.responses.create(**ask)
    events = checked(client.responses.create(**ask, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:2] == ["response.created", "response.in_progress"]
    assert kinds[-1] == "response.completed"
    for kind in ("reasoning_text", "output_text", "function_call_arguments"):
        deltas = [event.delta for event in events if event.type == f"response.{kind}.delta"]
        done = next(event for event in events if event.type == f"response.{kind}.done")
        assert "".join(deltas) == (done.arguments if kind.startswith("function") else done.text)
    final = events[-1].response
    assert kinds_of(final) == kinds_of(whole) == ["reasoning", "message", "function_call"]
    assert final.output_text == whole.output_text
    with client.responses.stream(**ask) as stream:
        for event in stream:
            assert event.type
        assert kinds_of(stream.get_final_response()) == kinds_of(whole)  # type: ignore[arg-type]


async def test_the_asynchronous_client(running: Running, says: Any) -> None:
    async with openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key=KEY, max_retries=0) as client:
        response = await client.responses.create(model="demo", input="Hi", extra_body=says("Yes, of course."))
        assert strict(response).output_text == "Yes, of course."
        stream = await client.responses.create(model="demo", input="Hi", stream=True, extra_body=says("No, no."))
        deltas = [event.delta async for event in stream if event.type == "response.output_text.delta"]
        assert "".join(deltas) == "No, no."


def test_calls_and_their_results(client: openai.OpenAI, says: Any) -> None:
    first = client.responses.create(model="demo", input="Weather?", tools=[TOOL], extra_body=says(SAID))
    function = strict(first).output[-1]
    assert function.type == "function_call"
    assert (function.name, json.loads(function.arguments)) == ("weather", {"city": "Paris"})
    result: Any = {"type": "function_call_output", "call_id": function.call_id, "output": "Sunny, 21 degrees."}
    again = client.responses.create(model="demo", input=[result], previous_response_id=first.id, tools=[TOOL],
                                    extra_body=says("It is sunny."))  # fmt: skip
    assert again.output_text == "It is sunny."
    by_hand: Any = [{"role": "user", "content": "Weather?"}, *[item.to_dict() for item in first.output], result]
    sent = client.responses.create(model="demo", input=by_hand, tools=[TOOL], extra_body=says("It is sunny."))
    assert sent.usage is not None
    assert again.usage is not None
    assert sent.usage.input_tokens == again.usage.input_tokens


def test_a_chain_remembers_and_instructions_do_not(client: openai.OpenAI, says: Any) -> None:
    """An engine that repeats its prompt shows what was rendered."""
    first = client.responses.create(
        model="demo", input="My name is Ann.", instructions="Be brief.", extra_body=says("Hello Ann.")
    )
    then = client.responses.create(
        model="demo", input="Who am I?", previous_response_id=first.id, instructions="Be kind.", max_output_tokens=80
    )
    for words in ("My name is Ann.", "Hello Ann.", "Who am I?", "Be kind."):
        assert words in then.output_text
    assert "Be brief." not in then.output_text
    assert (then.status, then.previous_response_id) == ("incomplete", first.id)
    assert then.incomplete_details is not None
    assert then.incomplete_details.reason == "max_output_tokens"


def test_in_the_background(client: openai.OpenAI, says: Any) -> None:
    response = client.responses.create(
        model="demo", input="Hi", background=True, extra_body=says("one two three four five")
    )
    assert response.status in ("queued", "in_progress")
    until(lambda: client.responses.retrieve(response.id).status == "completed")
    assert strict(client.responses.retrieve(response.id)).output_text == "one two three four five"
    everything = checked(client.responses.retrieve(response.id, stream=True))
    assert everything[-1].type == "response.completed"
    rest = list(client.responses.retrieve(response.id, stream=True, starting_after=4))
    assert [event.to_dict() for event in rest] == [event.to_dict() for event in everything[5:]]


def test_a_background_stream_goes_on_without_its_reader(client: openai.OpenAI) -> None:
    with client.responses.create(
        model="demo", input="Hi", background=True, stream=True, max_output_tokens=60, extra_body={"ignore_eos": True}
    ) as stream:
        first = next(iter(stream))
    assert first.type == "response.created"
    until(lambda: client.responses.retrieve(first.response.id).status == "incomplete")
    events = list(client.responses.retrieve(first.response.id, stream=True, starting_after=0))
    assert events[-1].type == "response.incomplete"


def test_cancelling(client: openai.OpenAI, running: Running, says: Any) -> None:
    slow = {"extra_args": {"fault": "slow"}}  # 8 s and more
    response = client.responses.create(
        model="demo", input="Hi", background=True, max_output_tokens=400, extra_body=slow
    )
    cancelled = client.responses.cancel(response.id)
    assert strict(cancelled).status == "cancelled"
    assert client.responses.cancel(response.id).status == "cancelled"
    assert list(client.responses.retrieve(response.id, stream=True, starting_after=1 << 30)) == []
    direct = client.responses.create(model="demo", input="Hi", extra_body=says("x"))
    with pytest.raises(openai.BadRequestError, match="not created in the background"):
        client.responses.cancel(direct.id)


def test_a_key_reads_only_its_own(client: openai.OpenAI, running: Running, says: Any) -> None:
    response = client.responses.create(model="demo", input="Secret", background=True, extra_body=says("x"))
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key=OTHER, max_retries=0) as other:
        for steal in (
            lambda: other.responses.retrieve(response.id),
            lambda: other.responses.retrieve(response.id, stream=True),
            lambda: other.responses.cancel(response.id),
            lambda: other.responses.delete(response.id),
            lambda: other.responses.input_items.list(response.id).data,
            lambda: other.responses.create(model="demo", input="x", previous_response_id=response.id),
        ):
            with pytest.raises(openai.NotFoundError, match="no response"):
                steal()
    assert client.responses.retrieve(response.id).id == response.id


def test_what_is_not_stored_is_gone(client: openai.OpenAI, says: Any) -> None:
    response = client.responses.create(model="demo", input="Hi", store=False, extra_body=says("x"))
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(response.id)


def test_tools_that_run_here(client: openai.OpenAI, says: Any) -> None:
    """The engine says the same in each round, so the last allowed call ends it."""
    ask: dict[str, Any] = {"model": "demo", "input": "Add", "tools": [MCP], "max_tool_calls": 2}
    response = strict(client.responses.create(**ask, extra_body=says(call("add", a=2, b=3))))
    assert kinds_of(response) == ["mcp_list_tools", "mcp_call", "mcp_call"]
    listed, first, _ = response.output
    assert listed.type == "mcp_list_tools"
    assert {tool.name for tool in listed.tools} == {"add", "fail"}
    assert first.type == "mcp_call"
    assert (first.output, first.error, first.status, first.server_label) == ("5", None, "completed", "calc")
    events = checked(client.responses.create(**ask, stream=True, extra_body=says(call("add", a=2, b=3))))
    kinds = [event.type for event in events]
    for kind in ("mcp_list_tools.completed", "mcp_call.in_progress", "mcp_call_arguments.done", "mcp_call.completed"):
        assert f"response.{kind}" in kinds
    failed = strict(client.responses.create(**ask, extra_body=says(call("fail", reason="no luck"))))
    item = failed.output[1]
    assert item.type == "mcp_call"
    assert (item.status, item.output) == ("failed", None)
    assert "Error executing tool fail" in str(item.error)


def test_blocks_elsewhere_are_those_of_the_first_reply(running: Running, says: Any) -> None:
    ask = {"input": "Add", "tools": [MCP], "kv_transfer_params": {"remote_block_ids": [[1, 2]]}}
    ask |= says(call("add", a=2, b=3))
    answers = [
        httpx.post(
            f"{running.url}/v1/responses", json={**ask, "max_tool_calls": replies}, headers={"x-api-key": KEY}
        ).json()
        for replies in (1, 2)
    ]
    assert [len(answer["output"]) for answer in answers] == [2, 3]
    assert answers[0]["kv_transfer_params"] == answers[1]["kv_transfer_params"]


@pytest.mark.parametrize(
    ("fields", "status", "words"),
    [
        ({"tools": [{**MCP, "server_label": "other"}]}, 400, "there are: calc, gone"),
        ({"tools": [{**MCP, "server_url": "http://169.254.169.254/"}]}, 400, "no tool server 'calc' was named"),
        ({"tools": [{**MCP, "require_approval": "always"}]}, 400, "require_approval"),
        ({"tools": [{**MCP, "server_label": "gone"}]}, 502, "does not answer"),
        ({"tools": [{"type": "file_search"}]}, 400, "'file_search'"),
        ({"tools": [{"type": "function"}]}, 400, "tools.0.name"),
        ({"tools": [TOOL, TOOL]}, 400, "different names"),
        ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "x"}}, 400, "'x'"),
        ({"input": [{"type": "computer_call"}]}, 400, "'computer_call'"),
        ({"input": [{"role": "robot", "content": "x"}]}, 400, "'robot'"),
        ({"input": [{"role": "user", "content": [{"type": "input_file"}]}]}, 400, "'input_file'"),
        ({"input": [{"type": "reasoning", "summary": [], "encrypted_content": "x"}]}, 400, "encrypted"),
        ({"input": []}, 400, "message"),
        ({"max_output_tokens": 0}, 400, "max_output_tokens"),
        ({"metadata": {str(n): "x" for n in range(17)}}, 400, "metadata"),
        ({"background": True, "store": False}, 400, "store=true"),
        ({"text": {"format": {"type": "json_schema"}}}, 400, "name and schema"),
        ({"include": ["everything"]}, 400, "include"),
        ({"conversation": "c"}, 400, "conversation is not served"),
        ({"previous_response_id": "resp_x"}, 404, "resp_x"),
        ({"model": "gpt"}, 404, "gpt"),
        ({"input": "word " * 5000}, 400, "tokens"),
        ({"top_logprobs": 21}, 400, "top_logprobs"),
        ({"n": 2}, 400, "n must be 1"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_is_wrong_gets_one_clear_error(running: Running, fields: dict[str, Any], status: int, words: str) -> None:
    body = {"model": "demo", "input": "x", **fields}
    response = httpx.post(f"{running.url}/v1/responses", json=body, headers={"x-api-key": KEY}, timeout=30)
    assert response.status_code == status, response.text
    assert words in response.json()["error"]["message"]


def test_a_failing_step_ends_a_stream_with_its_reason(client: openai.OpenAI) -> None:
    fault = {"extra_args": {"fault": "step"}}
    with pytest.raises(openai.InternalServerError, match="the device said no"):
        client.responses.create(model="demo", input="x", extra_body=fault)
    response = client.responses.create(model="demo", input="x", background=True, extra_body=fault)
    until(lambda: client.responses.retrieve(response.id).status == "failed")
    failed = strict(client.responses.retrieve(response.id))
    assert failed.error is not None
    assert (failed.error.code, "the device said no" in failed.error.message) == ("server_error", True)


def test_logprobs_and_truncation(client: openai.OpenAI, says: Any) -> None:
    response = client.responses.create(
        model="demo", input="x", top_logprobs=2, include=["message.output_text.logprobs"], extra_body=says("a b c")
    )
    part = strict(response).output[0].content[0]  # type: ignore[union-attr, index]
    assert len(part.logprobs) == response.usage.output_tokens  # type: ignore[union-attr, arg-type]
    assert len(part.logprobs[0].top_logprobs) == 2  # type: ignore[union-attr, index]
    long: Any = [{"role": "user", "content": f"number {number} " * 20} for number in range(40)]
    with pytest.raises(openai.BadRequestError, match="tokens"):
        client.responses.create(model="demo", input=long)
    short = client.responses.create(model="demo", input=long, truncation="auto", extra_body=says("ok"))
    assert short.output_text == "ok"
    assert short.usage is not None
    assert short.usage.input_tokens > 100
