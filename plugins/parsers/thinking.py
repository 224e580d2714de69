"""Reasoning parsers for models that write their reasoning between two tags."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar

from frame.interfaces import Content, OutputEvent, OutputReader, ParserRequest, Reasoning, ReasoningParser

from .frames import COHERE_FRAME, Frame, FramedReader
from .scan import Markers, Scan

_CALL_TAG = "<tool_call>"
#: What follows `_CALL_TAG` in a call, but not in reasoning that only mentions the tag.
_CALL_HEAD = re.compile(r'\s{0,16}(?:\{\s{0,16}"|<function=|[\w.\-]{1,64}\s{0,16}<(?:arg_key>|/tool_call>))')
_MAX_HEAD = 128


class TagReader(OutputReader):
    """Reasoning from one of `begin` to one of `end`, at most once and first in the output; content after it.

    `inside`: the output begins within the reasoning, so that `begin` may be missing. White space around the tags is
    dropped, and so is an end with which the output begins. A tool call that begins with one of `calls` ends the
    reasoning too.
    """

    def __init__(self, begin: Sequence[str], end: Sequence[str], inside: bool, calls: Sequence[str] = ()) -> None:
        self._closes = frozenset(end)
        self._begin = Markers((*begin, *end))
        self._end = Markers((*end, *calls))
        self._scan = Scan()
        self._inside = inside
        self._state = "start"
        self._space: list[str] = []
        self._events: list[OutputEvent] = []

    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        """Takes new text."""
        del token_ids
        if self._state == "content":
            return [Content(text)] if text else []
        if text:
            self._scan.feed(text)
            self._read()
        return self._taken()

    def finish(self) -> list[OutputEvent]:
        """Ends the output: returns the events of the text that was held back."""
        self._scan.ended = True
        self._read()
        if self._state == "start":
            self._events.append(Content("".join(self._space)))
        return self._taken()

    def _taken(self) -> list[OutputEvent]:
        events, self._events = self._events, []
        return events

    def _read(self) -> None:
        if self._state == "start":
            self._read_start()
        if self._state == "reasoning":
            self._read_reasoning()
        if self._state == "after" and self._scan.skip_space():
            self._state = "content"
        if self._state == "content" and not self._scan.empty:
            self._events.append(Content(self._scan.take(len(self._scan.text))))

    def _read_start(self) -> None:
        """Decides whether the output begins with reasoning or with content."""
        before = self._scan.at
        some = self._scan.skip_space()
        self._space.append(self._scan.text[before : self._scan.at])
        if not some:
            return
        marker = self._scan.over(self._begin)
        if marker is None:
            return
        if marker in self._closes:
            self._state = "after"
            self._space.clear()
        elif marker or self._inside:
            self._state = "reasoning"
            self._space.clear()
        else:
            self._state = "content"
            self._events.append(Content("".join(self._space)))

    def _read_reasoning(self) -> None:
        while self._state == "reasoning":
            text, marker = self._scan.until(self._end)
            ends = None if marker is None else marker in self._closes or self._is_call(marker)
            if marker is not None and marker not in self._closes and ends is not False:
                self._scan.at -= len(marker)
            self._emit_reasoning(text + marker if marker is not None and ends is False else text)
            if ends is None:
                return
            if ends:
                self._state = "after" if marker in self._closes else "content"

    def _is_call(self, marker: str) -> bool | None:
        """Whether a marker that was read begins a call and is not only mentioned; None: more text is needed."""
        if marker != _CALL_TAG:
            return True
        rest = self._scan.text[self._scan.at : self._scan.at + _MAX_HEAD]
        if _CALL_HEAD.match(rest):
            return True
        return False if self._scan.ended or len(rest) == _MAX_HEAD else None

    def _emit_reasoning(self, text: str) -> None:
        """Emits reasoning; white space at its end is held back until more reasoning follows."""
        body = text.rstrip()
        if body:
            first = self._space if self._spoken else ()
            self._events.append(Reasoning("".join(first) + (body if self._spoken else body.lstrip())))
            self._space = [text[len(body) :]]
            self._spoken = True
        else:
            self._space.append(text)

    _spoken = False


class TagParser(ReasoningParser):
    """Reasoning between the tags of a subclass. `implicit`: the model reasons without writing `begin`.

    `begins` and `closes` are further forms of the tags. `calls` are markers of tool calls, with which models sometimes
    go on without closing the reasoning. `frame` holds the tags around the answer.
    """

    begin: ClassVar[str] = "<think>"
    close: ClassVar[str] = "</think>"
    begins: ClassVar[Sequence[str]] = ()
    closes: ClassVar[Sequence[str]] = ()
    implicit: ClassVar[bool] = False
    calls: ClassVar[Sequence[str]] = ()
    frame: ClassVar[Frame] = Frame()

    def tokens(self) -> Sequence[str]:
        """All tags."""
        return (self.begin, self.close, *self.begins, *self.closes, *self.frame.begin, *self.frame.end)

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader that starts inside when the prompt has opened the reasoning, and outside when it has closed it."""
        begins, closes = (self.begin, *self.begins), (self.close, *self.closes)
        reader = TagReader(begins, closes, self.inside(request), self.calls if request.tools else ())
        return FramedReader(reader, self.frame) if self.frame != Frame() else reader

    def inside(self, request: ParserRequest) -> bool:
        """Whether the output begins within the reasoning."""
        prompt = request.prompt.rstrip()
        opened = any(prompt.endswith(tag.rstrip()) for tag in (self.begin, *self.begins))
        return opened or (self.implicit and not prompt.endswith(self.close))

    def end(self, request: ParserRequest) -> str | None:
        """The closing tag, unless the prompt has written it."""
        return None if request.prompt.rstrip().endswith(self.close) else self.close


class ThinkParser(TagParser):
    """`<think>…</think>`: Qwen3, GLM-4.5 and others, whose template or output opens it."""

    calls = (
        _CALL_TAG, "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>",
        "<｜DSML｜function_calls>", "<｜DSML｜tool_calls>",
    )  # fmt: skip


class ImplicitThinkParser(TagParser):
    """`…</think>`: DeepSeek-R1 and others that always reason."""

    implicit = True
    calls = (_CALL_TAG, "<minimax:tool_call>", "<｜tool▁calls▁begin｜>", "<｜tool_calls_begin｜>")


class MistralThinkParser(TagParser):
    """`[THINK]…[/THINK]`: Magistral and later."""

    begin = "[THINK]"
    close = "[/THINK]"
    calls = ("[TOOL_CALLS]",)


class GraniteThinkParser(TagParser):
    """Sentences instead of tags, as in Granite 3.2, or `<think>…</think><response>…</response>`, as in Granite 3.3."""

    begin = "Here is my thought process:"
    close = "Here is my response:"
    begins = ("Here's my thought process:", "<think>")
    closes = ("Here's my response:", "</think>")
    calls = ("<|tool_call|>", _CALL_TAG)
    frame = Frame(("<response>",), ("</response>",))

    def end(self, request: ParserRequest) -> str | None:
        """The closing tag of the form that the prompt asks for, unless the prompt has written it."""
        if "<think>" not in request.prompt:
            return super().end(request)
        return None if request.prompt.rstrip().endswith("</think>") else "</think>"


class SeedThinkParser(TagParser):
    """`<seed:think>…</seed:think>`: Seed-OSS."""

    begin = "<seed:think>"
    close = "</seed:think>"
    calls = ("<seed:tool_call>",)


class HunyuanThinkParser(TagParser):
    """`<think>…</think><answer>…</answer>`: Hunyuan A13B."""

    calls = ("<tool_calls>",)
    frame = Frame(("<answer>",), ("</answer>",))


class ApertusThinkParser(TagParser):
    """`<|inner_prefix|>…<|inner_suffix|>`: Apertus."""

    begin = "<|inner_prefix|>"
    close = "<|inner_suffix|>"
    calls = ("<|tools_prefix|>",)


class CohereThinkParser(TagParser):
    """`<|START_THINKING|>…<|END_THINKING|><|START_RESPONSE|>…<|END_RESPONSE|>`: Cohere's Command A."""

    begin = "<|START_THINKING|>"
    close = "<|END_THINKING|>"
    calls = ("<|START_ACTION|>",)
    frame = COHERE_FRAME


class Gemma4ThinkParser(TagParser):
    """`<|channel>thought…<channel|>`: Gemma 4."""

    begin = "<|channel>thought\n"
    close = "<channel|>"
    begins = ("<|channel>",)
    calls = ("<|tool_call>",)


class MiniMaxM3ThinkParser(TagParser):
    """`<mm:think>…</mm:think>`: MiniMax-M3."""

    begin = "<mm:think>"
    close = "</mm:think>"
    calls = ("]<]minimax[>[<tool_call>",)
