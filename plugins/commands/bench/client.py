"""Sends one request to an OpenAI-compatible server and times its stream."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from frame.settings import ConfigError

from .event_reader import EventReader
from .record import BenchRequest, MeasuredRequest

if TYPE_CHECKING:
    import httpx

_MAX_ERROR = 300


@dataclass(frozen=True)
class Target:
    """The server's address and the fields that every request carries.

    `path` begins with a slash. With `chat` a body holds messages, else a prompt.
    """

    base_url: str
    path: str
    model: str
    chat: bool
    fields: Mapping[str, Any] = field(default_factory=dict)
    headers: Mapping[str, str] = field(default_factory=dict)
    ignore_eos: bool = False


def http_client(headers: Mapping[str, str], timeout: float | None, connections: int | None = None) -> httpx.AsyncClient:
    """An HTTP client; `connections` limits how many it opens. Raises `ConfigError` where httpx is not installed."""
    try:
        import httpx
    except ModuleNotFoundError:
        raise ConfigError('`frame bench serve` needs httpx: pip install "frame-llm[bench]"') from None
    return httpx.AsyncClient(
        headers={"Accept-Encoding": "identity", **headers},
        timeout=httpx.Timeout(timeout, connect=30.0),
        limits=httpx.Limits(max_connections=connections, max_keepalive_connections=connections),
        trust_env=False,
    )


def body_of(target: Target, request: BenchRequest) -> dict[str, Any]:
    """The JSON body of a request."""
    if target.chat:
        messages = request.messages or [{"role": "user", "content": request.prompt}]
        prompt: dict[str, Any] = {"messages": list(messages), "max_completion_tokens": request.output_len}
    else:
        prompt = {"prompt": request.prompt, "max_tokens": request.output_len}
    body = {
        "model": target.model,
        **prompt,
        "stream": True,
        "stream_options": {"include_usage": True},
        "temperature": 0.0,
    }
    if target.ignore_eos:
        body["ignore_eos"] = True
    return body | dict(target.fields)


async def send(client: httpx.AsyncClient, target: Target, request: BenchRequest) -> MeasuredRequest:
    """Sends a request and reads its whole answer; a failure is noted in the record, not raised."""
    import httpx

    record = MeasuredRequest(prompt_len=request.prompt_len)
    content = msgspec.json.encode(body_of(target, request))
    answer = _Answer(record, target.chat)
    record.started = time.perf_counter()
    try:
        async with client.stream("POST", target.base_url + target.path, content=content) as response:
            if response.status_code != httpx.codes.OK:
                record.error = _refusal(response.status_code, await response.aread())
            else:
                await _read(response, answer)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError, TypeError, AttributeError) as error:
        # ValueError, TypeError and AttributeError come from an answer of an unexpected shape: only this request fails.
        record.error = f"{type(error).__name__}: {error}"[:_MAX_ERROR]
    record.latency = time.perf_counter() - record.started
    if record.success:
        answer.close()
    return record


async def _read(response: httpx.Response, answer: _Answer) -> None:
    stream = EventReader()
    # Raw chunks arrive sooner than decoded ones; a server may compress although it was asked not to.
    chunks = response.aiter_bytes() if "content-encoding" in response.headers else response.aiter_raw()
    async for chunk in chunks:
        now = time.perf_counter()
        for data in stream.feed(chunk):
            answer.event(data, now)


class _Answer:
    """Fills a record from the events of a stream."""

    def __init__(self, record: MeasuredRequest, chat: bool) -> None:
        self._record, self._chat = record, chat
        self._texts: list[str] = []
        self._newest = 0.0
        self._num_chunks = 0
        self._num_tokens: int | None = None
        self._ended = False

    def event(self, data: str, now: float) -> None:
        """One event's data, read at `now`."""
        if data == "[DONE]":
            self._ended = True
            return
        message = msgspec.json.decode(data)
        if not isinstance(message, dict):
            raise msgspec.DecodeError(f"the server sent an event that is no object: {data[:80]!r}")
        if message.get("error"):
            self._record.error = _sentence(message["error"])
            return
        usage = message.get("usage")
        if isinstance(usage, dict):
            self._num_tokens = usage.get("completion_tokens", self._num_tokens)
            self._record.prompt_len = usage.get("prompt_tokens") or self._record.prompt_len
        for choice in message.get("choices") or ():
            self._choice(choice, now)

    def _choice(self, choice: Mapping[str, Any], now: float) -> None:
        self._ended = self._ended or choice.get("finish_reason") is not None
        delta = choice.get("delta") or {}
        text = delta.get("content") or "" if self._chat else choice.get("text") or ""
        if self._chat:
            # A chat's first event often names the role alone: no token yet.
            is_token = any(value for name, value in delta.items() if name != "role")
        else:
            is_token = bool(text) or choice.get("finish_reason") is None
        if not is_token:
            return
        self._texts.append(text)
        self._num_chunks += 1
        if self._num_chunks == 1:
            self._record.ttft = now - self._record.started
        else:
            self._record.itls.append(now - self._newest)
        self._newest = now

    def close(self) -> None:
        """Called when the stream has ended: counts its tokens, and notes an answer that was cut off."""
        record = self._record
        record.text = "".join(self._texts)
        record.output_len = self._num_chunks if self._num_tokens is None else self._num_tokens
        if not self._ended:
            record.error = "the stream ended before the answer did"
        elif not self._num_chunks:
            record.ttft = record.latency  # no event showed text: the first token was seen only when the answer ended
        else:
            record.latency = self._newest - record.started


def _refusal(status: int, body: bytes) -> str:
    try:
        message = msgspec.json.decode(body)
        return f"HTTP {status}: {_sentence(message.get('error', message))}"
    except (msgspec.DecodeError, AttributeError):
        return f"HTTP {status}: {body[:_MAX_ERROR].decode('utf-8', 'replace')}".rstrip(": ")


def _sentence(error: Any) -> str:
    text = error.get("message", error) if isinstance(error, dict) else error
    return str(text)[:_MAX_ERROR]
