"""Output parsers: what a model wrote, piece by piece, as content, reasoning and tool calls.

A parser is built once in each API process and opens a reader for every output. Readers work on text as it arrives, so
that the answer at once is the stream's answer by construction: `feed` everything, then `finish`. They know no route
and no engine.
"""

from __future__ import annotations

import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import msgspec

from .sampling import StructuredOutputsParams

if TYPE_CHECKING:
    from .setup import ParserSetup


class Content(msgspec.Struct, frozen=True):
    """Text for the user."""

    text: str


class Reasoning(msgspec.Struct, frozen=True):
    """Text that the model wrote for itself."""

    text: str


class CallBegin(msgspec.Struct, frozen=True):
    """A tool call begins. `index` counts the calls of an output from 0; `id` is empty unless the format has one."""

    index: int
    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True):
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The arguments of a call are complete. Missing when the output ended inside them."""

    index: int


OutputEvent: TypeAlias = Content | Reasoning | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; empty takes any object."""

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    strict: bool = False

    def types_of(self, argument: str) -> frozenset[str]:
        """The JSON types that the schema allows for an argument; empty when it does not say."""
        properties = self.parameters.get("properties")
        return _types(properties.get(argument) if isinstance(properties, Mapping) else None)


#: Types as schemas write them that were made from the types of a programming language → JSON's.
_LOOSE_TYPES: Mapping[str, str] = MappingProxyType({
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "map": "object", "list": "array", "tuple": "array", "none": "null",
})  # fmt: skip


def json_type(name: str) -> str:
    """JSON's name of a schema's type: "float" is "number"; a name that is not known stays."""
    return _LOOSE_TYPES.get(name.lower(), name)


def _types(schema: Any, depth: int = 0) -> frozenset[str]:
    if not isinstance(schema, Mapping) or depth > 4:
        return frozenset()
    kind = schema.get("type")
    if isinstance(kind, str):
        return frozenset((json_type(kind),))
    if isinstance(kind, Sequence):
        return frozenset(json_type(one) for one in kind if isinstance(one, str))
    values = schema.get("enum", [schema["const"]] if "const" in schema else None)
    if isinstance(values, Sequence) and values and all(isinstance(value, str) for value in values):
        return frozenset(("string",))
    for union in ("anyOf", "oneOf"):
        branches = schema.get(union)
        if isinstance(branches, Sequence):
            found = [_types(branch, depth + 1) for branch in branches]
            return frozenset().union(*found) if found and all(found) else frozenset()
    return frozenset()


@dataclass(frozen=True, kw_only=True)
class ParserRequest:
    """What a parser may know of a request.

    `tools` are those that the model may call. `must_call`: it has to call one of them, at most one unless `parallel`.
    `prompt` is the rendered chat, whose end may have opened the reasoning; `template_kwargs` went into the template.
    """

    tools: Sequence[Tool] = ()
    must_call: bool = False
    parallel: bool = True
    prompt: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def tool(self, name: str) -> Tool | None:
        """The tool of that name."""
        return next((tool for tool in self.tools if tool.name == name), None)


@dataclass(frozen=True, kw_only=True)
class CallTags:
    """How a format writes calls, for grammars: `opener tag [separator tag]… closer`.

    `tags` are structural tags (type, begin, content, end), one for each tool. `separator` is None where an answer holds
    one call only. `trigger` is what the opener, or else every tag, begins with, and other text does not hold.
    """

    tags: Sequence[Mapping[str, Any]]
    trigger: str
    opener: str = ""
    separator: str | None = ""
    closer: str = ""


class OutputReader(ABC):
    """Reads one output.

    Events do not depend on how the text is cut into pieces, but for where one event of text ends and the next begins.
    The time is linear in the text's length. Text is emitted as soon as it can be no part of a marker. What looks like a
    call and is none stays content; once a call has begun, its text stays in its arguments, however malformed.
    """

    @abstractmethod
    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        """Takes new text and the ids that came with it (a character may lag behind its ids); raises nothing."""

    @abstractmethod
    def finish(self) -> list[OutputEvent]:
        """The output has ended: what was held back. Called once, last."""


class _Parser(ABC):
    """What both kinds share.

    `special_tokens` are texts of special tokens that must stay in the text for the reader to see them; those that the
    vocabulary lacks are ignored.
    """

    special_tokens: ClassVar[Sequence[str]] = ()

    def __init__(self, setup: ParserSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.render: Callable[..., str] | None = setup.render

    def tokens(self) -> Sequence[str]:
        """The special tokens to keep, where they follow from the template; the class's by default."""
        return self.special_tokens

    @abstractmethod
    def start(self, request: ParserRequest) -> OutputReader:
        """A reader for one output."""


class ToolParser(_Parser):
    """Finds tool calls. Built as `Class(setup, options)` in each API process.

    `reads_reasoning`: its readers tell reasoning from content too, so no reasoning parser runs before them, and they
    also read outputs of requests without tools.
    """

    reads_reasoning: ClassVar[bool] = False

    def new_id(self) -> str:
        """An id for a call whose format has none."""
        return f"call_{secrets.token_hex(12)}"

    def constraint(self, request: ParserRequest) -> StructuredOutputsParams | None:
        """The grammar of outputs that call as `request` demands; None when this format has none.

        Asked for when the request must call. The text that the grammar allows is read by `start(request)`.
        """
        del request
        return None

    def call_tags(self, request: ParserRequest) -> CallTags | None:
        """How `start(request)` reads calls of the request's tools; None when that is no structural tag.

        Asked for when a grammar holds over an answer in which the model may call: because the text has a format, or
        because a tool is strict, whose arguments must obey its schema.
        """
        del request
        return None

    def end(self, request: ParserRequest) -> str | None:
        """As a reasoning parser's `end`, for formats with `reads_reasoning`."""
        del request
        return None


class ReasoningParser(_Parser):
    """Tells reasoning from content: its readers emit `Reasoning` and `Content`; a tool parser then reads the content.

    Built as `Class(setup, options)` in each API process.
    """

    def end(self, request: ParserRequest) -> str | None:
        """The text that ends the reasoning which the output begins with or may begin with; None when there is none.

        A constraint on the output holds from there on.
        """
        del request
        return None


class ToolCall(msgspec.Struct):
    """A complete call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class AssistantMessage:
    """The events of one output, put together."""

    def __init__(self) -> None:
        self._content: list[str] = []
        self._reasoning: list[str] = []
        self._calls: list[tuple[CallBegin, list[str]]] = []

    def add(self, events: Sequence[OutputEvent]) -> None:
        """Takes further events."""
        for event in events:
            if type(event) is Content:  # nearly all
                self._content.append(event.text)
                continue
            match event:
                case Reasoning():
                    self._reasoning.append(event.text)
                case CallBegin():
                    self._calls.append((event, []))
                case CallArguments():
                    self._calls[-1][1].append(event.text)

    @property
    def content(self) -> str:
        """All text for the user."""
        return "".join(self._content)

    @property
    def reasoning(self) -> str:
        """All reasoning."""
        return "".join(self._reasoning)

    @property
    def calls(self) -> list[ToolCall]:
        """The calls in order."""
        return [ToolCall(begin.id, begin.name, "".join(texts)) for begin, texts in self._calls]


def joined(events: Sequence[OutputEvent]) -> list[OutputEvent]:
    """The same events with neighbours of one kind put together and empty ones left out."""
    found: list[OutputEvent] = []
    texts: list[str] = []
    for position, event in enumerate(events):
        if not isinstance(event, (Content, Reasoning, CallArguments)):
            found.append(event)
            continue
        texts.append(event.text)
        following = events[position + 1] if position + 1 < len(events) else None
        if type(following) is type(event):
            continue
        text = "".join(texts)
        texts.clear()
        if text:
            found.append(CallArguments(event.index, text) if isinstance(event, CallArguments) else type(event)(text))
    return found
