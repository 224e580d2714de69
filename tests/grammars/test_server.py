"""Structured output over HTTP, as OpenAI's client asks for it, and hostile grammars among honest requests."""

from __future__ import annotations

import json
import threading
import time
import tomllib
from enum import Enum
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from pydantic import BaseModel, ConfigDict, Field

from tests.server.running import REAL, Running, server

pytestmark = pytest.mark.product


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


class Pet(BaseModel):
    model_config = ConfigDict(extra="forbid")

    name: str = Field(max_length=20)
    age: int = Field(ge=0, le=40)
    colour: Colour
    tags: list[Colour] = Field(max_length=2)


SCHEMA = Pet.model_json_schema()
MESSAGES: list[Any] = [{"role": "user", "content": "Describe a pet."}]


@pytest.fixture(scope="module")
def running():
    with server(
        REAL, "--num-threads", "1", "--disable-access-log", "--disable-any-whitespace",
        "--grammar-compile-seconds", "1.5", "--grammar-compile-bytes", "256000000",
    ) as running:  # fmt: skip
        yield running


@pytest.fixture(scope="module")
def client(running: Running):
    with openai.OpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def post(running: Running, route: str = "completions", **fields: Any) -> httpx.Response:
    body = {"prompt": "x", "max_tokens": 100} if route == "completions" else {"messages": MESSAGES, "max_tokens": 100}
    return httpx.post(f"{running.url}/v1/{route}", json={**body, **fields}, timeout=60)


def test_parse_with_pydantic(client: openai.OpenAI) -> None:
    answer = client.chat.completions.parse(
        model="demo", messages=MESSAGES, response_format=Pet, max_tokens=200, n=2, seed=1
    )
    for choice in answer.choices:
        assert isinstance(choice.message.parsed, Pet)
        assert choice.finish_reason == "stop"


def test_json_schema_and_object(client: openai.OpenAI) -> None:
    form: Any = {"type": "json_schema", "json_schema": {"name": "pet", "strict": True, "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format=form, max_tokens=200, temperature=1.0, logprobs=True
    )
    Pet.model_validate_json(answer.choices[0].message.content or "")
    assert answer.choices[0].logprobs is not None
    answer = client.chat.completions.create(
        model="demo", messages=MESSAGES, response_format={"type": "json_object"}, max_tokens=60, temperature=0.0
    )
    content = answer.choices[0].message.content or ""
    assert content.startswith("{")
    if answer.choices[0].finish_reason == "stop":
        assert isinstance(json.loads(content), dict)


def test_streams(client: openai.OpenAI) -> None:
    stream = client.completions.create(
        model="demo", prompt="A pet:", max_tokens=200, stream=True, extra_body={"structured_outputs": {"json": SCHEMA}}
    )
    Pet.model_validate_json("".join(chunk.choices[0].text for chunk in stream))


@pytest.mark.parametrize(
    ("constraint", "obeyed"),
    [
        ({"regex": "[0-9]{4}"}, lambda text: text.isdigit() and len(text) == 4),
        ({"choice": ["yes", "no"]}, ("yes", "no").__contains__),
        ({"grammar": 'root ::= "go " ("left" | "right")'}, ("go left", "go right").__contains__),
        ({"json": json.dumps(SCHEMA), "whitespace_pattern": " "}, Pet.model_validate_json),
        (
            {"structural_tag": {"type": "structural_tag", "format": {"type": "const_string", "value": "<ok>"}}},
            "<ok>".__eq__,
        ),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_extra_fields_of_vllm(client: openai.OpenAI, constraint: dict[str, Any], obeyed: Any) -> None:
    answer = client.completions.create(
        model="demo", prompt="x", max_tokens=200, extra_body={"structured_outputs": constraint}
    )
    assert obeyed(answer.choices[0].text), answer.choices[0].text


def test_a_structural_tag_as_response_format(running: Running) -> None:
    form = {
        "type": "structural_tag",
        "structures": [{"begin": "<pet>", "schema": SCHEMA, "end": "</pet>"}],
        "triggers": ["<pet"],
    }
    bias = {str(token): 30 for token in httpx.post(
        f"{running.url}/tokenize", json={"prompt": "<", "add_special_tokens": False}).json()["tokens"]}  # fmt: skip
    answer = post(running, "chat/completions", response_format=form, logit_bias=bias, max_tokens=60).json()
    content = answer["choices"][0]["message"]["content"]
    assert "<pet" not in content or content.partition("<pet")[2].startswith(">{")


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"structured_outputs": {}}, "needs one of: json, regex, choice"),
    ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "takes one constraint, got 2: regex, choice"),
    ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "send one of them"),
    ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
    ({"structured_outputs": {"regex": "(("}}, "unclosed group"),
    ({"structured_outputs": {"regex": "(?=a)b"}}, "look-around"),
    ({"structured_outputs": {"regex": "[^\\s\\S]"}}, "no output can satisfy it"),
    ({"structured_outputs": {"grammar": "start: missing"}}, 'unknown name: "missing"'),
    ({"structured_outputs": {"grammar": "root ::= ("}}, "structured_outputs.grammar"),
    ({"structured_outputs": {"json": "{"}}, "is not JSON"),
    ({"structured_outputs": {"json": "[]"}}, "a JSON schema must be an object"),
    ({"structured_outputs": {"json": {"type": "text"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"json": {"type": "array", "uniqueItems": True}}}, "uniqueItems"),
    ({"structured_outputs": {"json": {"$ref": "http://127.0.0.1:1/x"}}}, "structured_outputs.json"),
    ({"structured_outputs": {"structural_tag": "{}"}}, "needs format, or structures and triggers"),
    ({"structured_outputs": {"structural_tag": {"format": {"type": "x"}}}}, "format type of a structural tag"),
    ({"response_format": {"type": "json_schema"}}, "needs json_schema"),
    ({"guided_json": {"type": "object"}}, "guided_json is not served: send structured_outputs"),
]


@pytest.mark.parametrize(("fields", "message"), WRONG, ids=lambda value: json.dumps(value)[:60])
def test_wrong_constraints_get_one_clear_400(running: Running, fields: dict[str, Any], message: str) -> None:
    for stream in (False, True):
        response = post(running, stream=stream, **fields)
        assert response.status_code == 400, response.text
        error = response.json()["error"]["message"]
        assert message in error
        assert error.count("structured_outputs.json") <= 1
        assert "\n" not in error


CHAIN = "\n".join(["start: r0", *(f"r{number}: r{number + 1}" for number in range(18_000)), 'r18000: "a"'])
DOUBLING = "\n".join(["start: A0", *(f"A{number}: A{number + 1} A{number + 1}" for number in range(40)), 'A40: "a"'])
EITHER = [[{"properties": {f"p{a}{b}": {}}, "required": [f"p{a}{b}"]} for b in range(6)] for a in range(9)]
HOSTILE: dict[str, dict[str, Any]] = {
    "rules without end": {"grammar": CHAIN},
    "doubling terminals": {"grammar": DOUBLING},
    "many intersections": {"json": {"allOf": [{"type": "string", "pattern": f".*{n}.*"} for n in range(100)]}},
    "choices of choices": {"json": {"allOf": [{"oneOf": one} for one in EITHER]}},
    "nested groups": {"regex": "(" * 100_000 + "a" + ")" * 100_000},
    "nested rules": {"grammar": "start: " + "(" * 100_000 + '"a"' + ")" * 100_000},
    "nested schema": {"json": '{"items":' * 20_000 + "{}" + "}" * 20_000},
    "too long": {"regex": "a" * 300_000},
}


def test_hostile_grammars_end_in_one_400_and_stall_nobody(running: Running) -> None:
    """All at once, while a stream runs, whose pauses stay short; and afterwards the server is as it was."""
    answers: dict[str, tuple[httpx.Response, float]] = {}

    def attack(name: str) -> None:
        start = time.monotonic()
        answers[name] = post(running, structured_outputs=HOSTILE[name]), time.monotonic() - start

    threads = [threading.Thread(target=attack, args=(name,)) for name in HOSTILE]
    finished: list[str] = []

    def honest() -> None:
        for number in range(4):
            response = post(running, max_tokens=60, ignore_eos=True, temperature=0.0, prompt=f"The sea {number}")
            finished.append(response.json()["choices"][0]["finish_reason"])

    threads.append(threading.Thread(target=honest))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert finished == ["length"] * 4
    for name, (response, seconds) in answers.items():
        assert response.status_code == 400, (name, response.text[:300])
        message = response.json()["error"]["message"]
        assert len(message) < 700, name
        assert "\n" not in message, name
        assert seconds < 60, (name, seconds)
    assert "grammar_compile_seconds" in answers["many intersections"][0].json()["error"]["message"]
    answer = post(running, structured_outputs={"choice": ["still here"]}).json()
    assert answer["choices"][0]["text"] == "still here"


def test_equal_refusals_are_not_tried_again(running: Running) -> None:
    """A trial takes 1.5 seconds, so that twenty would take 30."""
    start = time.monotonic()
    for _ in range(20):
        response = post(running, structured_outputs=HOSTILE["many intersections"])
        assert response.status_code == 400
    assert time.monotonic() - start < 20


CALL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "strict": True,
        "parameters": {
            "type": "object",
            "properties": {"city": {"enum": ["Paris", "Rome"]}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
@pytest.mark.parametrize("stated", [True, False], ids=["format", "free text"])
def test_tools_beside_a_format(running: Running, choice: str, stated: bool) -> None:
    """An answer is a call of the offered tool that obeys its schema, or text in the format; no flag is needed."""
    form = (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "pet", "schema": SCHEMA}}} if stated else {}
    )
    for text in ("How is the weather in Rome?", "Describe a pet.", "Hello."):
        asked = {"messages": [{"role": "user", "content": text}], "tools": [CALL], "tool_choice": choice, **form}
        answer = post(running, "chat/completions", temperature=0, **asked)
        assert answer.status_code == 200, answer.text
        (found,) = answer.json()["choices"]
        calls = found["message"].get("tool_calls") or []
        for call in calls:
            assert call["function"]["name"] == "get_weather"
            if found["finish_reason"] != "length":
                assert json.loads(call["function"]["arguments"])["city"] in ("Paris", "Rome")
        assert not (calls and choice == "none")
        assert calls or choice != "required"
        if stated and not calls and found["finish_reason"] == "stop":
            Pet.model_validate_json(found["message"]["content"])


def test_grammars_need_no_extra() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert any(name.startswith("llguidance") for name in project["dependencies"])
