"""Finds out how a chat template writes calls with JSON arguments, so that a grammar can permit exactly such calls.

The template renders calls with known names and arguments; the text around these is the format, to the character.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from frame.interfaces import CallBegin, CallEnd, CallTags, ParserRequest, Tool, ToolParser

from .probes import FIRST, SECOND, TEXT_KEY, bodies, common_end, common_length, json_end

#: Placeholders for the name of the function, and for its name with the number of the call.
BLANK, NUMBERED = "\0", "\1"
_NUMBER = re.compile(rf"{BLANK}:\d+")
_MARKER = re.compile(r"<[^<>\s]+>|\[[A-Z_]+\]")
#: Rests of markers: the common part of two texts may begin and end inside a marker.
_CUT_BEGIN, _CUT_END = re.compile(r"^[^<\[{]*[>\]](?=[<\[{])"), re.compile(r"<[^<>]*$")
#: The id of a call as templates write it. It is removed, so that it is no part of a marker.
_ID = re.compile(
    r',\s*"(?:tool_call_)?id":\s*"probecal\d"|"(?:tool_call_)?id":\s*"probecal\d",\s*|\[CALL_ID\]probecal\d'
)


@dataclass(frozen=True)
class CallShape:
    """`opener begin ARGUMENTS end [separator begin ARGUMENTS end]… closer`; `begin` holds `BLANK` in place of
    the name.

    `separator` is None where the template writes one call only.
    """

    opener: str
    begin: str
    end: str
    separator: str | None
    closer: str

    def tags(self, tools: Sequence[Tool]) -> CallTags:
        """Tags for calls of these tools. Arguments of strict tools obey their schemas, others are any object."""
        head = re.split(f"[{BLANK}{NUMBERED}]", self.opener + self.begin)[0]
        marker = _MARKER.match(head)
        return CallTags(
            tags=[self._tag(tool) for tool in tools],
            opener=self.opener,
            separator=self.separator,
            closer=self.closer,
            trigger=marker.group() if marker is not None else head,
        )

    def call(self, name: str, arguments: str) -> str:
        """One call as text."""
        return self.begin.replace(NUMBERED, f"{BLANK}:0").replace(BLANK, name) + arguments + self.end

    def _tag(self, tool: Tool) -> dict[str, Any]:
        content: dict[str, Any] = {"type": "json_schema", "json_schema": schema_of(tool)}
        begin, numbered, rest = self.begin.partition(NUMBERED)
        if numbered:
            begin += BLANK + ":"
            digits = {"type": "regex", "pattern": "[0-9]{1,3}"}
            content = {"type": "sequence", "elements": [digits, {"type": "const_string", "value": rest}, content]}
        return {"type": "tag", "begin": begin.replace(BLANK, tool.name), "content": content, "end": self.end}


def schema_of(tool: Tool) -> dict[str, Any]:
    """The JSON schema of the arguments of a call."""
    return {"type": "object", **tool.parameters} if tool.strict else {"type": "object"}


def read_shape(render: Callable[..., str]) -> CallShape | None:
    """The shape of calls in a template; None when it writes none, or their arguments are not JSON."""
    try:
        one, two = (_ID.sub("", text) for text in bodies(render, several=False))
    except ValueError:
        return None
    first = _place(one, FIRST)
    if first is None:
        return None
    if SECOND not in two:
        return CallShape("", one[: first[0]].replace(FIRST, BLANK).lstrip(), one[first[1] :].rstrip(), None, "")
    first, second = _place(two, FIRST), _place(two, SECOND)
    if first is None or second is None:
        return None
    before = _NUMBER.sub(NUMBERED, two[: first[0]].replace(FIRST, BLANK)).lstrip()
    between = _NUMBER.sub(NUMBERED, two[first[1] : second[0]].replace(SECOND, BLANK))
    after = two[second[1] :].rstrip()
    begin = _CUT_BEGIN.sub("", common_end(before, between))
    if BLANK not in begin and NUMBERED not in begin:
        return None
    rest = between.removesuffix(begin)
    end = _CUT_END.sub("", rest[: common_length(rest, after)])
    return CallShape(before.removesuffix(begin), begin, end, rest.removeprefix(end), after.removeprefix(end))


def _place(text: str, name: str) -> tuple[int, int] | None:
    """The places in the text where the arguments of the call of `name` begin and end."""
    match = re.compile(rf'{name}[^{{]*(\{{\s*"{TEXT_KEY}")').search(text)
    return None if match is None else (match.start(1), json_end(text, match.start(1)))


class TemplateCalls(ToolParser):
    """A parser of calls with JSON arguments, whose grammar is what the chat template writes, if the parser reads it."""

    @cached_property
    def _shape(self) -> CallShape | None:
        shape = read_shape(self.render) if self.render is not None else None
        return shape if shape is not None and self._reads(shape) else None

    def _reads(self, shape: CallShape) -> bool:
        """Whether the parser finds the calls that the template writes."""
        tool = Tool("probe")
        reader = self.start(ParserRequest(tools=[tool]))
        texts = [shape.call(tool.name, '{"a": [1]}')] * (1 if shape.separator is None else 2)
        events = reader.feed(shape.opener + (shape.separator or "").join(texts) + shape.closer)
        events += reader.finish()
        calls = [event.name for event in events if isinstance(event, CallBegin)]
        ends = sum(isinstance(event, CallEnd) for event in events)
        return calls == [tool.name] * len(texts) and ends == len(texts)

    def call_tags(self, request: ParserRequest) -> CallTags | None:
        """Calls as the template writes them; None when this parser does not read them."""
        return self._shape.tags(request.tools) if self._shape is not None else None
