"""The contract of output parsers: the same events however the text is cut, no text lost, no code run, linear time."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import pytest

from frame.core.interfaces.parser import (
    AssistantMessage,
    CallArguments,
    CallBegin,
    CallEnd,
    Content,
    OutputEvent,
    OutputReader,
    ParserRequest,
    Reasoning,
    Tool,
    joined,
)

from .plugin_suite import PluginSuite

#: The functions that a request of the suites offers.
TOOLS = (
    Tool(
        "get_weather",
        {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}},
        "The weather of a city",
    ),
    Tool("get_time", {"type": "object", "properties": {}}),
)
#: What the example of a tool parser calls: its text must call this function once, with these arguments.
CALL = ("get_weather", {"city": "Paris", "days": 3})
#: What the example of a reasoning parser holds.
THOUGHT, SAID = "The user is in Paris.", "It rains."

_PLAIN = (
    "It rains in Paris.",
    "a\n\n b\t c  ",
    "naïve café 日本語 😀 \u2028 end",
    "1 < 2 > 0, {not: json} [nor a list] (or a call)",
    "   \n",
    "",
)
_HOSTILE = (
    "__import__('os').system('touch /tmp/owned')",
    "f(x=__import__('os'))",
    "{" * 300,
    '{"name": "get_weather", "arguments": ' + '{"a":' * 300,
    "[" * 300 + "]" * 300,
    '"\\' * 50,
    "\\u12",
    "\x00\x01\ud7ff\ufffe",
)
#: Time of twice the text over the time of the text, generous towards a busy machine: quadratic code has 4, and 16.
_MAX_GROWTH = 3.5


class _ParserSuite(PluginSuite):
    """The checks that both suites share. `example` is an output in the parser's format; see the subclasses."""

    example: ClassVar[str] = ""
    #: further outputs, right or wrong, that come in any cut
    outputs: ClassVar[Sequence[str]] = ()
    #: the end of the prompt
    prompt: ClassVar[str] = ""

    def text(self) -> str:
        """The example: the suite's, else the provider's tag "example"."""
        text = self.example or self.provider().tags.get("example", "")
        if not text:
            pytest.fail(f'{type(self).__name__} needs `example`, or the provider tags={{"example": …}}')
        return text

    def request(self) -> ParserRequest:
        """A request that offers `TOOLS`."""
        return ParserRequest(tools=TOOLS, prompt=self.prompt)

    def parser(self) -> Any:
        """A new parser."""
        return self.make(render=_render)

    def events(self, pieces: Sequence[str], parser: Any = None) -> list[OutputEvent]:
        """The events of an output that comes in these pieces, checked for order."""
        reader: OutputReader = (parser or self.parser()).start(self.request())
        assert isinstance(reader, OutputReader), f"start must give an OutputReader, gave {type(reader).__name__}"
        found: list[OutputEvent] = []
        for piece in pieces:
            found += reader.feed(piece, ())
        found += reader.finish()
        self.check_order(found)
        return joined(found)

    @staticmethod
    def check_order(events: Sequence[OutputEvent]) -> None:
        """Calls are numbered from 0, and their parts follow their beginning."""
        begun, current = 0, None
        for event in events:
            if isinstance(event, CallBegin):
                assert event.index == begun, f"call {event.name!r} has index {event.index}, must have {begun}"
                assert event.name, "a call has no name"
                begun, current = begun + 1, event.index
            elif isinstance(event, (CallArguments, CallEnd)):
                assert event.index == current, f"{event} does not belong to the open call {current}"
                current = None if isinstance(event, CallEnd) else current
            else:
                assert isinstance(event, (Content, Reasoning)), f"{event!r} is no event"

    def texts(self) -> Iterator[str]:
        """The example, all its beginnings, damaged copies of it, and text that is meant to do harm."""
        text = self.text()
        yield from (text, text + text, f"Well:\n{text}", f"{text}\nDone.", *self.outputs, *_PLAIN, *_HOSTILE)
        draw = random.Random(0)
        for end in range(0, len(text), max(1, len(text) // 16)):
            yield text[:end]
            yield text[:end] + draw.choice(_HOSTILE) + text[end:]
            yield text[:end] + text[end + draw.randrange(1, 9) :]

    def test_pieces_do_not_matter(self) -> None:
        parser, draw = self.parser(), random.Random(1)
        for text in self.texts():
            whole = self.events([text], parser)
            assert self.events(list(text), parser) == whole, f"one character at a time differs for {text[:200]!r}"
            for size in (3, 30):
                pieces, at = [], 0
                while at < len(text):
                    step = draw.randrange(1, size + 1)
                    pieces.append(text[at : at + step])
                    at += step
                assert self.events(pieces, parser) == whole, f"pieces {pieces[:50]!r} differ from their whole"

    def test_plain_text_stays_content(self) -> None:
        parser = self.parser()
        for text in _PLAIN:
            message = AssistantMessage()
            message.add(self.events([text], parser))
            assert not message.calls, f"{text!r} became a call"
            said = message.reasoning + message.content
            assert said.split() == text.split(), f"{text!r} became {said!r}"

    def test_text_beside_the_example_is_not_lost(self) -> None:
        parser, text = self.parser(), self.text()
        message = AssistantMessage()
        message.add(self.events([f"Well: \n{text}"], parser))
        said = message.reasoning + message.content
        assert "Well:" in said, f"of 'Well:' before the example {said!r} is left"

    def test_readers_do_not_share_state(self) -> None:
        parser, text = self.parser(), self.text()
        first, second = parser.start(self.request()), parser.start(self.request())
        half = len(text) // 2
        found = [first.feed(text[:half]), second.feed(text[:half])]
        found[1] += [*second.feed(text[half:]), *second.finish()]
        found[0] += [*first.feed(text[half:]), *first.finish()]
        assert joined(found[0]) == joined(found[1]) == self.events([text], parser)

    def test_time_is_linear(self) -> None:
        parser, text = self.parser(), self.text()
        head = text[: len(text) // 2]
        for unit in (text, head, "{", '"\\', "<tool_call>"):
            for size in (1 << 20, 16):
                for attempt in range(3):
                    short, long = (self._seconds(parser, unit * (n // len(unit) + 1), size) for n in (12_000, 48_000))
                    if long < 0.05 or long < short * 4 * _MAX_GROWTH:
                        break
                    assert attempt < 2, (
                        f"12,000 characters of {unit[:40]!r} take {short:.3f} s, four times as many {long:.3f} s"
                    )

    def _seconds(self, parser: Any, text: str, size: int) -> float:
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        reader = parser.start(self.request())
        start = time.thread_time()
        for piece in pieces:
            reader.feed(piece, ())
        reader.finish()
        return time.thread_time() - start


class ToolParserSuite(_ParserSuite):
    """The contract of `frame.interfaces.ToolParser`.

        class TestMine(ToolParserSuite):
            plugin = "mine"                            # or target = "package.module:Class"
            example = "<call>get_weather(…)</call>"    # calls get_weather with city "Paris" and days 3, once

    Without `example`, the provider's tag "example" is taken.
    """

    kind = "tool-parser"

    def test_the_example_is_a_call(self) -> None:
        message = AssistantMessage()
        events = self.events([self.text()])
        message.add(events)
        assert [call.name for call in message.calls] == [CALL[0]], f"the example calls {message.calls}"
        arguments = message.calls[0].arguments
        assert json.loads(arguments) == CALL[1], f"the example's arguments are {arguments!r}"
        assert CallEnd(0) in events, "the call of the example has no end"

    def test_demands_are_grammars(self) -> None:
        parser = self.parser()
        constraint = parser.constraint(ParserRequest(tools=TOOLS, must_call=True, parallel=False))
        if constraint is not None:
            constraint.verify()
        ids = {parser.new_id() for _ in range(20)}
        assert len(ids) == 20, "new_id repeats itself"
        assert all(isinstance(one, str) and one for one in ids), "new_id must give texts"


class ReasoningParserSuite(_ParserSuite):
    """The contract of `frame.interfaces.ReasoningParser`.

        class TestMine(ReasoningParserSuite):
            plugin = "mine"                            # or target = "package.module:Class"
            example = "<why>The user is in Paris.</why>It rains."

    Without `example`, the provider's tag "example" is taken. It holds this reasoning and this content.
    """

    kind = "reasoning-parser"

    def test_the_example_is_split(self) -> None:
        message = AssistantMessage()
        message.add(self.events([self.text()]))
        assert message.reasoning == THOUGHT, f"the example's reasoning is {message.reasoning!r}"
        assert message.content == SAID, f"the example's content is {message.content!r}"

    def test_no_call_comes_of_it(self) -> None:
        parser = self.parser()
        for text in self.texts():
            for event in self.events([text], parser):
                assert isinstance(event, (Content, Reasoning)), f"{text[:100]!r} gave {event}"

    def test_the_end_is_in_the_example(self) -> None:
        end = self.parser().end(self.request())
        assert end is None or end in self.text(), f"end gives {end!r}, which is not in the example"


def _render(messages: Sequence[Any], *, tools: Any = None, add_generation_prompt: bool = True, **_: Any) -> str:
    """A chat template: ChatML, calls as tagged JSON."""
    text = f"<|im_start|>system\n{json.dumps(tools)}<|im_end|>\n" if tools else ""
    for message in messages:
        body = message.get("content") or ""
        for call in message.get("tool_calls") or ():
            function = {key: call["function"][key] for key in ("name", "arguments")}
            body += f"<tool_call>\n{json.dumps(function)}\n</tool_call>"
        text += f"<|im_start|>{message['role']}\n{body}<|im_end|>\n"
    return text + ("<|im_start|>assistant\n" if add_generation_prompt else "")
