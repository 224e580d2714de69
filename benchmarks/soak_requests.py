"""What the clients of a soak ask, and what they got: streams of several routes as plain data that can be compared."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

_PROMPTS = ("Once upon a time", "The sea is", "A cat and a dog", "My friend", "The little house by the sea. " * 12)
_KINDS: tuple[Mapping[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1, "seed": 11},
    {"temperature": 0.8, "seed": 12, "presence_penalty": 1.0, "n": 2},
    {"temperature": 1, "seed": 13, "logprobs": 2},
    {"temperature": 1, "seed": 14, "logprobs": 1, "n": 2, "deterministic": True},
    {"temperature": 0.9, "seed": 15, "frequency_penalty": 0.5, "deterministic": True},
)
_SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "count": {"type": "integer"},
        "ok": {"type": "boolean"},
    },
    "required": ["name", "count", "ok"],
    "additionalProperties": False,
}
_TOOL = {"type": "function", "function": {"name": "note", "parameters": _SCHEMA}}


class Refused(Exception):
    """The server answered with an error."""


@dataclass(frozen=True)
class Question:
    """One streamed request. `num_tokens`: of its answer, where that is certain beforehand."""

    path: str
    body: dict[str, Any]
    num_tokens: int | None = None

    @property
    def exact(self) -> bool:
        """Whether its answer must have the same bits every time."""
        return bool(self.body.get("deterministic"))


@dataclass
class Answer:
    """All that a stream said, by index of the output."""

    texts: dict[int, str] = field(default_factory=dict)
    logprobs: dict[int, list[float]] = field(default_factory=dict)
    ends: dict[int, str] = field(default_factory=dict)
    num_tokens: int = 0

    def add(self, event: dict[str, Any]) -> None:
        """Takes an event of a stream of completions or of a chat."""
        for choice in event.get("choices", ()):
            index, delta = choice["index"], choice.get("delta", {})
            calls = delta.get("tool_calls") or ()
            text = (choice.get("text") or delta.get("content") or "") + "".join(
                call["function"].get("arguments") or "" for call in calls
            )
            self.texts[index] = self.texts.get(index, "") + text
            if choice.get("finish_reason"):
                self.ends[index] = choice["finish_reason"]
            logprobs = choice.get("logprobs") or {}
            self.logprobs.setdefault(index, []).extend(logprobs.get("token_logprobs") or ())
        self.num_tokens = (event.get("usage") or {}).get("completion_tokens", self.num_tokens)


def questions() -> list[Question]:
    """Everything that is asked."""
    found = [
        Question(
            "/v1/completions",
            {"prompt": prompt, "max_tokens": length, "ignore_eos": True, **kind},
            length * int(kind.get("n", 1)),
        )
        for prompt in _PROMPTS
        for kind in _KINDS
        for length in (8, 64)
    ]
    chat = {"messages": [{"role": "user", "content": "Tell me a story."}], "deterministic": True, "seed": 3}
    schema = {"type": "json_schema", "json_schema": {"name": "thing", "schema": _SCHEMA}}
    found += [
        Question("/v1/chat/completions", {**chat, "max_tokens": 48}),
        Question("/v1/chat/completions", {**chat, "max_tokens": 96, "stop": ["qz", "the"]}),
        Question("/v1/chat/completions", {**chat, "max_tokens": 160, "response_format": schema}),
        Question("/v1/chat/completions", {**chat, "max_tokens": 160, "tools": [_TOOL], "tool_choice": "required"}),
    ]
    return found


async def ask(client: httpx.AsyncClient, question: Question, leave_after: int | None = None) -> Answer | None:
    """The answer to a question; None when it was left after so many events. Raises `Refused`, or what httpx does."""
    answer, events = Answer(), 0
    body = {"model": "demo", **question.body, "stream": True, "stream_options": {"include_usage": True}}
    ended = False
    async with client.stream("POST", question.path, json=body) as response:
        if response.status_code != 200:
            raise Refused(f"status {response.status_code}: {(await response.aread())[:200]!r}")
        async for line in response.aiter_lines():
            ended = ended or line == "data: [DONE]"
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            if "error" in event:
                raise Refused(event["error"]["message"])
            answer.add(event)
            events += 1
            if leave_after is not None and events >= leave_after:
                return None
    if not ended:
        raise Refused("the stream ended without [DONE]")
    return answer


def verdict(question: Question, answer: Answer, wanted: Answer) -> str:
    """How an answer compares with that of an undisturbed run: "equal", "parted at a near tie", or what is wrong."""
    if question.num_tokens is not None and answer.num_tokens != question.num_tokens:
        return f"wrong: {answer.num_tokens} tokens instead of {question.num_tokens}"
    if answer.texts == wanted.texts and (answer == wanted or not question.exact):
        return "equal"
    if question.exact:
        return f"wrong: not the bits of the undisturbed run of {json.dumps(question.body)[:150]}"
    return "parted at a near tie"
