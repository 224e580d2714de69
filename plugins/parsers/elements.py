"""Tool calls whose arguments are elements named after their keys, which may hold further elements: MiniMax-M3.

`]<]minimax[>[<invoke name="NAME">]<]minimax[>[<KEY>VALUE]<]minimax[>[</KEY>]<]minimax[>[</invoke>`: every tag comes
after a prefix. A value that is no scalar is an element of elements: those of a list are named `item`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from frame.interfaces import OutputReader, ParserRequest, Tool

from .formats import TaggedParser
from .literals import MAX_DEPTH, LiteralError, to_json
from .tagged_calls import KEY, TaggedCallReader, TaggedFormat
from .values import TEXT, Kinds, Value

PREFIX = "]<]minimax[>["
_TAG = re.compile(re.escape(PREFIX) + r"<(/?)([^<>\n]{1,256})>")
_ITEM = "item"


@dataclass
class Element:
    """A tag with what stands in it."""

    name: str
    text: list[str] = field(default_factory=list)
    children: list[Element] = field(default_factory=list)


def read_elements(text: str) -> Element:
    """The elements of a value, below a nameless one; raises `LiteralError` where a tag has no partner."""
    root = Element("")
    path, at = [root], 0
    for tag in _TAG.finditer(text):
        path[-1].text.append(text[at : tag.start()])
        at = tag.end()
        if not tag.group(1):
            path.append(Element(tag.group(2)))
            path[-2].children.append(path[-1])
        elif path.pop().name != tag.group(2) or not path:
            raise LiteralError("an element with another end")
        if len(path) > MAX_DEPTH:
            raise LiteralError("nested too deeply")
    path[-1].text.append(text[at:])
    if len(path) > 1:
        raise LiteralError("an element that does not end")
    return root


def element_json(element: Element, kinds: frozenset[str], schema: Mapping[str, Any]) -> str:
    """The JSON of an element by its schema and the types that this allows; raises `LiteralError` for mixed content."""
    if not element.children:
        return _scalar_json("".join(element.text), kinds)
    if "".join(element.text).strip():
        raise LiteralError("text beside elements")
    names = {child.name for child in element.children}
    if ("array" in kinds and "object" not in kinds) or (not kinds and names == {_ITEM}):
        items = _part(schema, "items")
        item_kinds = Kinds(Tool("", {"properties": {_ITEM: items}})).of(_ITEM)
        return f"[{', '.join(element_json(child, item_kinds, items) for child in element.children)}]"
    properties = _part(schema, "properties")
    of = Kinds(Tool("", {"properties": properties})).of
    values: dict[str, list[str]] = {}
    for child in element.children:
        found = properties.get(child.name)
        below = found if isinstance(found, Mapping) else {}
        values.setdefault(child.name, []).append(element_json(child, of(child.name), below))
    pairs = (f"{to_json(name)}: {_one_or_list(written)}" for name, written in values.items())
    return f"{{{', '.join(pairs)}}}"


def _one_or_list(written: Sequence[str]) -> str:
    return written[0] if len(written) == 1 else f"[{', '.join(written)}]"


def _scalar_json(text: str, kinds: frozenset[str]) -> str:
    if not text.strip() and kinds and "string" not in kinds:
        empty = next((written for kind, written in (("array", "[]"), ("object", "{}")) if kind in kinds), None)
        if empty is not None:
            return empty
    return Value(kinds, False).feed(text, True)


def _part(schema: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """`properties` or `items` of a schema, or of the first alternative that has them; empty when there is none."""
    unions = [schema.get(union) for union in ("anyOf", "oneOf")]
    branches = [schema, *(one for union in unions if isinstance(union, list) for one in union)]
    found = (branch.get(name) for branch in branches if isinstance(branch, Mapping))
    return next((part for part in found if isinstance(part, Mapping)), {})


class ElementValue(Value):
    """A value that is a scalar or elements."""

    def __init__(self, kinds: frozenset[str], schema: Mapping[str, Any]) -> None:
        super().__init__(kinds, False)
        self._schema = schema

    def converted(self, text: str) -> str:
        """The value as JSON; elements that do not fit together stay text."""
        try:
            return element_json(read_elements(text), self.kinds, self._schema)
        except LiteralError:
            return to_json(text)


class ElementCallReader(TaggedCallReader):
    """Reads calls whose values are elements. A value with elements in it may hold some of its own name."""

    _depth = 0
    _own = ""

    def value_of(self, key: str, is_text: bool | None) -> Value:
        """What converts the value of an argument."""
        del is_text
        self._depth = 0
        properties = _part(self.tool.parameters if self.tool is not None else {}, "properties")
        schema = properties.get(key)
        return ElementValue(self.kinds.of(key), schema if isinstance(schema, Mapping) else {})

    def marks_in(self, key: str) -> Sequence[str]:
        """A further argument ends a text without an end; other values may hold any element."""
        if self.kinds.of(key) == TEXT:
            self._own = ""
            return (self.form.key_begin,)
        self._own = f"{self.form.key_begin}{key}{self.form.key_end}"
        return (self._own,)

    def ends_value(self, marker: str) -> bool | None:
        """Whether a marker ends the value; ends of inner elements of the same name do not."""
        if marker == self._own:
            self._depth += 1
            return False
        if marker == self.close and self._depth:
            self._depth -= 1
            return False
        return super().ends_value(marker)


class MiniMaxM3Parser(TaggedParser):
    """Calls of elements after a prefix: MiniMax-M3."""

    form = TaggedFormat(
        begin=(f'{PREFIX}<invoke name="',), name_end='">', key_begin=f"{PREFIX}<", key_end=">",
        value_end=f"{PREFIX}</{KEY}>", end=f"{PREFIX}</invoke>", opener=(f"{PREFIX}<tool_call>",),
        closers=(f"{PREFIX}</tool_call>",),
    )  # fmt: skip

    def tokens(self) -> Sequence[str]:
        """The prefix, and the tags that may be tokens."""
        return (PREFIX, "<tool_call>", "</tool_call>")

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of calls of elements."""
        return ElementCallReader(request, self.form)
