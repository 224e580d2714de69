"""Output parsers: divide what a model writes into content, reasoning and tool calls.

A parser is built once in each API process and opens a reader for every output. A reader works on text as it arrives; an
answer that is not streamed is read the same way, so that both are equal. Parsers know no route and no engine.
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
    """A tool call begins. `index` counts the calls of an output from 0; `id` is empty unless the model wrote one."""

    index: int
    name: str
    id: str = ""


class CallArguments(msgspec.Struct, frozen=True):
    """A further piece of the JSON text of a call's arguments."""

    index: int
    text: str


class CallEnd(msgspec.Struct, frozen=True):
    """The arguments of a call are complete. There is no such event when the output ended inside them."""

    index: int


OutputEvent: TypeAlias = Content | Reasoning | CallBegin | CallArguments | CallEnd


@dataclass(frozen=True)
class Tool:
    """A function that the model may call. `parameters` is the JSON schema of its arguments; {} allows any object.

    `strict`: the grammar of the output enforces the schema.
    """

    name: str
    parameters: Mapping[str, Any] = field(default_factory=dict)
    description: str = ""
    strict: bool = False

    def types_of(self, argument: str) -> frozenset[str]:
        """Returns the JSON types that the schema allows for an argument; empty when it does not say."""
        properties = self.parameters.get("properties")
        return _types(properties.get(argument) if isinstance(properties, Mapping) else None)


#: Names of types in schemas that were made from a programming language → JSON's names.
_LOOSE_TYPES: Mapping[str, str] = MappingProxyType({
    "str": "string", "text": "string", "int": "integer", "long": "integer", "float": "number", "double": "number",
    "bool": "boolean", "dict": "object", "map": "object", "list": "array", "tuple": "array", "none": "null",
})  # fmt: skip


def json_type(name: str) -> str:
    """Returns JSON's name of a schema's type: "number" for "float"; an unknown name stays."""
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

    The model may call `tools`, and has to with `must_call`; without `parallel` it makes one call at most. `prompt` is
    the rendered chat, whose end may open the reasoning; `template_kwargs` were given to the template.
    """

    tools: Sequence[Tool] = ()
    must_call: bool = False
    parallel: bool = True
    prompt: str = ""
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)

    def tool(self, name: str) -> Tool | None:
        """Returns the tool of that name; None when there is none."""
        return next((tool for tool in self.tools if tool.name == name), None)


@dataclass(frozen=True, kw_only=True)
class CallTags:
    """How a format writes calls, for grammars: `opener tag [separator tag]… closer`.

    `tags` are structural tags (type, begin, content, end), one for each tool. `separator` is None if an answer holds
    one call only. `trigger` is a text with which the opener, or without one every tag, begins, and which appears
    nowhere else.
    """

    tags: Sequence[Mapping[str, Any]]
    trigger: str
    opener: str = ""
    separator: str | None = ""
    closer: str = ""


class OutputReader(ABC):
    """Reads one output, in time proportional to its length.

    The events do not depend on how the text is cut into pieces, except where one text ends and the next begins.
    A reader emits text as soon as it cannot be part of a marker. Text that looks like a call and is none stays content.
    Once a call has begun, its text belongs to its arguments, however malformed.
    """

    @abstractmethod
    def feed(self, text: str, token_ids: Sequence[int] = ()) -> list[OutputEvent]:
        """Takes new text and the token ids that came with it, and returns its events. Never raises.

        The ids may be ahead of the text, whose last character may need further ids.
        """

    @abstractmethod
    def finish(self) -> list[OutputEvent]:
        """Called once, when the output has ended; returns the events of the text that was held back."""


class _Parser(ABC):
    """What tool parsers and reasoning parsers have in common."""

    #: texts of special tokens that must stay in the text for readers; those that the vocabulary lacks are ignored
    special_tokens: ClassVar[Sequence[str]] = ()

    def __init__(self, setup: ParserSetup, options: Any = None) -> None:
        self.setup = setup
        self.options = options
        self.render: Callable[..., str] | None = setup.render

    def tokens(self) -> Sequence[str]:
        """Returns the special tokens to keep; override it where they depend on the template."""
        return self.special_tokens

    @abstractmethod
    def start(self, request: ParserRequest) -> OutputReader:
        """Returns a reader for one output of `request`."""

    def end(self, request: ParserRequest) -> str | None:
        """Returns the text that ends reasoning at the beginning of the output; None when it cannot begin with any.

        A constraint on the output holds from that text on. Tool parsers are asked if they have `reads_reasoning`.
        """
        del request
        return None


class ToolParser(_Parser):
    """Finds tool calls. Built as `Class(setup, options)` in each API process."""

    #: whether its readers also separate reasoning from content; they then read outputs of requests without tools as
    #: well, and no reasoning parser runs before them
    reads_reasoning: ClassVar[bool] = False

    def new_id(self) -> str:
        """Returns an id for a call to which the model gave none."""
        return f"call_{secrets.token_hex(12)}"

    def constraint(self, request: ParserRequest) -> StructuredOutputsParams | None:
        """Returns the grammar of outputs that call as `request` demands; None when this format has none.

        Called for requests that must call. `start(request)` must read every text that the grammar allows.
        """
        del request
        return None

    def call_tags(self, request: ParserRequest) -> CallTags | None:
        """Returns how this format writes calls of the request's tools; None when structural tags cannot say it.

        Called when the model may call, and a grammar holds over its answer: because the text has a format, or because a
        tool is strict.
        """
        del request
        return None


class ReasoningParser(_Parser):
    """Separates reasoning from content: its readers emit `Reasoning` and `Content`; a tool parser reads the content.

    Built as `Class(setup, options)` in each API process.
    """


class ToolCall(msgspec.Struct):
    """A complete call. `arguments` is JSON text."""

    id: str
    name: str
    arguments: str


class AssistantMessage:
    """The message that the events of one output make together."""

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
    """Returns the same events, with neighbouring texts of one kind joined and empty ones left out."""
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
