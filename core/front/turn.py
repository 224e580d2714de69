"""Splits output text into content, reasoning and tool calls with the chosen parsers; one `AssistantTurn` a request.

Knows no wire format and no engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import msgspec

from ..interfaces.errors import RequestError
from ..interfaces.parser import (
    AssistantMessage,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    OutputEvent,
    OutputReader,
    ParserRequest,
    Reasoning,
    ReasoningParser,
    ToolParser,
    joined,
)
from ..interfaces.sampling import SamplingParams, StructuredOutputsParams
from .call_formats import only_calls, text_or_calls, text_with_calls
from .tools import ToolChoice

if TYPE_CHECKING:
    from .output_parsers import OutputParsers


class AssistantTurn:
    """Implements `frame.interfaces.Turn`."""

    def __init__(
        self, parsers: OutputParsers, request: ParserRequest, choice: ToolChoice, include_reasoning: bool
    ) -> None:
        hidden = choice.none and parsers.exclude_when_none
        self.tools = choice.definitions if choice.definitions and not hidden else None
        self._parsers = parsers
        self._request = request
        self._include_reasoning = include_reasoning
        self._tool_parser = parsers.tools if request.tools else None
        if parsers.tools is not None and parsers.tools.reads_reasoning and parsers.reasoning is None:
            self._tool_parser = parsers.tools
        self._readers: dict[int, TurnReader] = {}

    def constrain(self, params: SamplingParams, prompt: str | None) -> SamplingParams:
        """The parameters with what the parsers need and the tool choice demands."""
        self._request = replace(self._request, prompt=prompt or "")
        changes: dict[str, Any] = {}
        constraint = params.structured_outputs
        if self._request.must_call:
            constraint = self._demanded()
        elif self._request.tools:
            constraint = self._allowed(constraint)
        if constraint is not None:
            changes["structured_outputs"] = self._after_reasoning(constraint)
        kept = self._kept_tokens()
        if kept and params.skip_special_tokens:
            changes["kept_special_token_ids"] = kept
        return msgspec.structs.replace(params, **changes) if changes else params

    def read(self, completion: Any) -> list[OutputEvent]:
        """The events that a new completion output adds."""
        reader = self._readers.get(completion.index)
        if reader is None:
            reader = self._readers[completion.index] = self._reader()
        return reader.read(completion.text, completion.token_ids, completion.finish_reason is not None)

    def message(self, index: int = 0) -> AssistantMessage:
        """The whole message so far of the output with this index."""
        reader = self._readers.get(index)
        return reader.message if reader is not None else AssistantMessage()

    def finish_reason(self, completion: Any) -> str | None:
        """Why the output ended."""
        reason: str | None = completion.finish_reason
        reader = self._readers.get(completion.index)
        return "tool_calls" if reason == "stop" and reader is not None and reader.message.calls else reason

    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning of all outputs."""
        return sum(reader.num_reasoning_tokens(self._parsers.encode) for reader in self._readers.values())

    def _demanded(self) -> StructuredOutputsParams:
        """The grammar of a demanded call, and the parser that reads it; the text's format does not apply."""
        strict = replace(self._request, tools=[replace(tool, strict=True) for tool in self._request.tools])
        for parser in (self._parsers.tools, self._parsers.forced):
            if parser is None:
                continue
            calls = parser.call_tags(strict) if parser is self._parsers.tools else None
            constraint = only_calls(calls, strict.parallel) if calls is not None else None
            constraint = constraint or parser.constraint(strict)
            if constraint is not None:
                self._tool_parser = parser
                return constraint
        raise RequestError(400, "no tool parser here has a grammar to demand a call with", param="tool_choice")

    def _allowed(self, constraint: StructuredOutputsParams | None) -> StructuredOutputsParams | None:
        """The grammar of an answer that may call tools, needed where the text has a format or a tool is strict."""
        own, request = self._tool_parser, self._request
        if constraint is None:
            if own is None or not any(tool.strict for tool in request.tools):
                return None
            calls = own.call_tags(request)
            if calls is None:
                self._parsers.cannot_be_strict(own)
                return None
            return text_with_calls(calls, request.parallel)
        if own is not None and own.end(request) is not None:
            return constraint  # the constraint applies to the text only; the parser's format writes the calls
        for parser in (own, self._parsers.forced):
            calls = parser.call_tags(request) if parser is not None else None
            if calls is not None:
                self._tool_parser = parser
                return text_or_calls(constraint, calls, request.parallel)
        return constraint

    def _after_reasoning(self, constraint: StructuredOutputsParams) -> StructuredOutputsParams:
        """The constraint, applied only after the end of the reasoning where the output has any."""
        end = self._reasoning_end()
        if end is None or constraint.start_after:
            return constraint
        return msgspec.structs.replace(constraint, start_after=self._parsers.encode(end))

    def _reasoning_end(self) -> str | None:
        """The text that ends the reasoning, as the parser that reads the reasoning gives it."""
        own = self._parsers.tools
        parser = self._parsers.reasoning or (own if own is not None and own.reads_reasoning else None)
        return parser.end(self._request) if parser is not None else None

    def _kept_tokens(self) -> list[int]:
        """Ids of the special tokens that the readers must see."""
        texts = [text for parser in self._reading_parsers() for text in parser.tokens()]
        found = (self._parsers.token_id(text) for text in texts)
        return sorted({token for token in found if token is not None})

    def _reading_parsers(self) -> list[ToolParser | ReasoningParser]:
        tools = self._tool_parser
        reads_all = tools is not None and tools.reads_reasoning
        reasoning: ToolParser | ReasoningParser | None = None if reads_all else self._parsers.reasoning
        own = self._parsers.tools
        if not reads_all and reasoning is None and own is not None and own.reads_reasoning:
            reasoning = own  # the forced parser reads the demanded call
        return [parser for parser in (reasoning, tools) if parser is not None]

    def _reader(self) -> TurnReader:
        readers = [parser.start(self._request) for parser in self._reading_parsers()]
        end = self._reasoning_end()
        end_ids = self._parsers.encode(end) if end is not None else []
        new_id = self._tool_parser.new_id if self._tool_parser is not None else str
        return TurnReader(
            readers,
            self._request.parallel,
            self._include_reasoning,
            new_id,
            end_token=end_ids[0] if len(end_ids) == 1 else None,
        )


class TurnReader:
    """Reads one output with a chain of readers: each gets the text that the one before it passed on as content.

    The first one finds the reasoning, the second one calls.

    `end_token` is the token that ends the reasoning, None where no single token does.
    """

    def __init__(
        self,
        readers: Sequence[OutputReader],
        parallel: bool,
        include_reasoning: bool,
        new_id: Callable[[], str],
        *,
        end_token: int | None = None,
    ) -> None:
        self._new_id = new_id
        self.message = AssistantMessage()
        self.reasoning: list[str] = []
        self.end_token = end_token
        self._num_tokens = 0
        self._num_until_end: int | None = None
        self._readers = list(readers)
        self._parallel = parallel
        self._include_reasoning = include_reasoning

    def read(self, text: str, token_ids: Sequence[int], finished: bool) -> list[OutputEvent]:
        """The events of new text, and at the end of the output the events of the text that was held back."""
        if not self._readers:
            if not text:
                return []
            content: list[OutputEvent] = [Content(text)]
            self.message.add(content)
            return content
        self._count(token_ids)
        events: list[OutputEvent] = [Content(text)] if text else []
        for reader in self._readers:
            events = self._through(reader, events, token_ids, finished)
        events = joined([event for event in map(self._shown, events) if event is not None])
        self.message.add(events)
        return events

    def _count(self, token_ids: Sequence[int]) -> None:
        if self._num_until_end is None and self.end_token is not None and self.end_token in token_ids:
            self._num_until_end = self._num_tokens + list(token_ids).index(self.end_token)
        self._num_tokens += len(token_ids)

    def num_reasoning_tokens(self, encode: Callable[[str], list[int]]) -> int:
        """Tokens before the one that ends the reasoning; where no single token ends it, the tokens of its text."""
        if not self.reasoning:
            return 0
        if self.end_token is None or (self._num_until_end is None and (self.message.calls or self.message.content)):
            return len(encode("".join(self.reasoning)))
        return self._num_tokens if self._num_until_end is None else self._num_until_end

    @staticmethod
    def _through(
        reader: OutputReader, events: list[OutputEvent], token_ids: Sequence[int], finished: bool
    ) -> list[OutputEvent]:
        found: list[OutputEvent] = []
        for event in events:
            if isinstance(event, Content):
                found += reader.feed(event.text, token_ids)
            else:
                found.append(event)
        if finished:
            found += reader.finish()
        return found

    def _shown(self, event: OutputEvent) -> OutputEvent | None:
        if isinstance(event, Reasoning):
            self.reasoning.append(event.text)
            return event if self._include_reasoning else None
        if isinstance(event, (CallBegin, CallArguments, CallEnd)) and event.index and not self._parallel:
            return None
        if isinstance(event, CallBegin):
            return event if event.id else CallBegin(event.index, event.name, self._new_id())
        return event
