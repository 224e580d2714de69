"""Generates one response: replies of the model and calls of tools that the server runs, until it is complete.

Knows no store and no HTTP; the caller drives it by reading its events.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

import msgspec

from frame.interfaces import RequestError, Serving

from .openai_logprobs import TokenTexts
from .replies import Conversation, Piece, Reply
from .responses_bodies import ResponsesBody
from .responses_output import OutputItems
from .tool_servers import ToolError, ToolServers

logger = logging.getLogger("frame.server")

Object = dict[str, Any]

_MAX_SERVER_CALLS = 32


@dataclass
class Usage:
    """Tokens of all replies."""

    prompt: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0

    def add(self, reply: Reply) -> None:
        """Adds the tokens of a reply that has ended."""
        self.prompt += reply.num_prompt_tokens
        self.cached += reply.num_cached_tokens
        self.output += reply.num_output_tokens
        self.reasoning += reply.num_reasoning_tokens()

    def shown(self, details: bool) -> Object:
        """The usage object of a response."""
        return {
            "input_tokens": self.prompt,
            "input_tokens_details": {"cached_tokens": self.cached if details else 0, "cache_write_tokens": 0},
            "output_tokens": self.output,
            "output_tokens_details": {"reasoning_tokens": self.reasoning},
            "total_tokens": self.prompt + self.output,
        }


@dataclass(frozen=True)
class Tooling:
    """`labels`: function that this server runs → its tool server; `listed`: the output items that list them."""

    labels: Mapping[str, str] = field(default_factory=dict)
    listed: tuple[Object, ...] = ()


class ResponseRun:
    """Generates one response. `response` is the object that a client sees at any time."""

    def __init__(
        self, serving: Serving, body: ResponsesBody, response: Object, conversation: Conversation, tooling: Tooling,
        servers: ToolServers,
    ) -> None:  # fmt: skip
        self.response = response
        self._serving = serving
        self._body = body
        self._conversation = conversation
        self._tooling = tooling
        self._servers = servers
        self._output = OutputItems(tooling.labels)
        self._texts = TokenTexts(serving.text.token_bytes, False)
        self._usage = Usage()
        #: the error that ended the response, if one did
        self.failure: RequestError | None = None
        self._number = 0
        self._kv_transfer = body.kv_transfer_params
        self._reply: Reply | None = None
        self._pieces: AsyncGenerator[Piece, None] | None = None
        self._first: Piece | None = None

    async def begin(self) -> None:
        """Starts the first reply; raises `RequestError` when the request is wrong."""
        self._pieces = self._next_reply()
        self._first = await anext(self._pieces, None)

    async def frames(self, details: bool) -> AsyncGenerator[bytes, None]:
        """All events, numbered. A failure becomes the last event; closing the generator cancels the rest."""
        response = self.response
        try:
            yield self._life("created")
            if response["status"] == "queued":
                yield self._life("queued")
            response["status"] = "in_progress"
            yield self._life("in_progress")
            async with aclosing(self._events()) as events:
                async for event in events:
                    yield self._frame(event)
        except RequestError as error:
            self._fail(error)
        except Exception:
            logger.exception("a response failed")
            self._fail(RequestError(500, "internal error"))
        finally:
            if self._pieces is not None:
                await self._pieces.aclose()
            if response["status"] == "in_progress":
                response["status"] = "cancelled"
            response["output"] = self._output.items
            response["completed_at"] = int(time.time()) if response["status"] == "completed" else None
            response["usage"] = self._usage.shown(details)
        yield self._life(response["status"])

    def _fail(self, error: RequestError) -> None:
        self.failure = error
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        self.response["status"] = "failed"
        self.response["error"] = {"code": code, "message": " ".join(error.message.split())[:2000]}

    async def _events(self) -> AsyncGenerator[Object, None]:
        """The events between the first and the last; sets the status of the response."""
        output = self._output
        for item in self._tooling.listed:
            for event in output.add(item, "mcp_list_tools"):
                yield event
        num_left = min(self._body.max_tool_calls or _MAX_SERVER_CALLS, _MAX_SERVER_CALLS)
        while True:
            reason = "stop"
            output.begin_reply()
            async for piece in self._all_pieces():
                for event in output.feed(piece.events, self._logprobs(piece)):
                    yield event
                reason = piece.finish_reason or reason
            for event in output.finish(reason != "length"):
                yield event
            if reason == "length":
                self.response["status"] = "incomplete"
                self.response["incomplete_details"] = {"reason": "max_output_tokens"}
                return
            if not output.server_calls:
                break
            for call in output.server_calls:
                num_left -= 1
                for event in await self._run_call(call, num_left >= 0):
                    yield event
            if output.calls or num_left <= 0:
                break
            self._continue(output.server_calls)
        self.response["status"] = "completed"

    async def _all_pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces of the next reply; `begin` may have read the first one already."""
        pieces = self._pieces = self._pieces or self._next_reply()
        first, self._first = self._first, None
        if first is not None:
            yield first
        async for piece in pieces:
            yield piece
        self._pieces = None
        if self._reply is not None:
            self._usage.add(self._reply)
            if self._reply.kv_transfer_params is not None:
                self.response["kv_transfer_params"] = self._reply.kv_transfer_params

    def _next_reply(self) -> AsyncGenerator[Piece, None]:
        body = self._body
        left = None if body.max_output_tokens is None else max(1, body.max_output_tokens - self._usage.output)
        self._reply = Reply(
            self._serving,
            self._conversation,
            body,
            max_tokens=left,
            n=1,
            logprobs=(body.top_logprobs or 0) if body.with_logprobs else None,
            structured_outputs=body.constraint(),
        )
        # later replies have other prompts
        given, self._kv_transfer = self._kv_transfer, None
        return self._reply.run(
            self.response["id"], priority=body.priority, cache_salt=body.cache_salt, kv_transfer=given
        )

    async def _run_call(self, call: Object, allowed: bool) -> list[Object]:
        """Runs one call of a tool server. Errors are passed to the model, which may try again."""
        try:
            if not allowed:
                raise ToolError("max_tool_calls is reached")
            arguments = _arguments(call["arguments"])
            output = await self._servers.call(call["server_label"], call["name"], arguments)
        except ToolError as error:
            return self._output.answered(call, None, str(error))
        return self._output.answered(call, output, None)

    def _continue(self, calls: list[Object]) -> None:
        """Adds calls and results to the conversation for the next reply."""
        said = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls
        ]
        results = [
            {"role": "tool", "tool_call_id": c["id"], "content": c["output"] or (c["error"] or {}).get("content", "")}
            for c in calls
        ]
        messages = [*self._conversation.messages, {"role": "assistant", "content": "", "tool_calls": said}, *results]
        # the first reply has made the call that a tool choice demands, so the next one is free
        choice = None if self._conversation.tool_choice in (None, "none") else "auto"
        self._conversation = replace(self._conversation, messages=messages, tool_choice=choice)

    def _logprobs(self, piece: Piece) -> list[Any]:
        if not self._body.with_logprobs or not piece.logprobs:
            return []
        shown = self._texts.chat(piece.token_ids, piece.logprobs, self._body.top_logprobs or 0)
        return [msgspec.to_builtins(each) for each in shown.content]

    def _life(self, kind: str) -> bytes:
        return self._frame({"type": f"response.{kind}", "response": self.response})

    def _frame(self, event: Object) -> bytes:
        event["sequence_number"] = self._number
        self._number += 1
        return b"event: %s\ndata: %s\n\n" % (event["type"].encode(), msgspec.json.encode(event))


def _arguments(text: str) -> Object:
    try:
        value = json.loads(text or "{}")
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise ToolError(f"the arguments are not a JSON object: {text[:200]}")
    return value
