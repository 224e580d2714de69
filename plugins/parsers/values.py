"""Converts the value of one argument, which a model writes as text, to JSON while it arrives. Knows no format.

A value that the tool's schema calls text is streamed, any other is read as JSON or as a Python literal once it is
complete. A value that cannot be read stays text.
"""

from __future__ import annotations

from frame.interfaces import Tool

from .literals import LiteralError, read_json, read_literal, to_json

#: The JSON types of a value that is text, and of one that is anything else.
TEXT = frozenset(("string",))
NOT_TEXT = frozenset(("integer", "number", "boolean", "null", "object", "array"))


class Kinds:
    """The JSON types that the arguments of one call may have, by the schema of its tool, which may be missing."""

    def __init__(self, tool: Tool | None) -> None:
        self._tool = tool
        self._found: dict[str, frozenset[str]] = {}  # a schema may be long, and each piece of a value asks

    def of(self, key: str) -> frozenset[str]:
        """The types of an argument; empty when the schema does not say."""
        if self._tool is None:
            return frozenset()
        if key not in self._found:
            self._found[key] = self._tool.types_of(key)
        return self._found[key]


class Value:
    """Converts one value to JSON. `padding`: one line break on each side of it belongs to the format."""

    def __init__(self, kinds: frozenset[str], padding: bool) -> None:
        self.kinds = kinds
        self._padding = padding
        self._streams = kinds == TEXT
        self._texts: list[str] = []
        self._begun = False
        self._held = ""

    def feed(self, text: str, ended: bool) -> str:
        """The JSON text that a further piece adds."""
        if self._streams:
            return self._stream(text, ended)
        self._texts.append(text)
        return self.converted("".join(self._texts)) if ended else ""

    def _stream(self, text: str, ended: bool) -> str:
        text = self._held + text
        self._held = ""
        opening = ""
        if not self._begun:
            if not text and not ended:
                return ""
            self._begun, opening = True, '"'
            text = text.removeprefix("\n") if self._padding else text
        if self._padding:
            if ended:
                text = text.removesuffix("\n")
            elif text.endswith("\n"):
                text, self._held = text[:-1], "\n"
        return opening + to_json(text)[1:-1] + ('"' if ended else "")

    def converted(self, text: str) -> str:
        """A complete value as JSON."""
        if self._padding:
            text = text.removeprefix("\n").removesuffix("\n")
        bare = text.strip()
        for read in (read_json, read_literal):
            try:
                value = read(bare)
                if self._fits(value):
                    return to_json(value)
            except (LiteralError, RecursionError):
                continue
        if "boolean" in self.kinds and bare.lower() in ("true", "false"):
            return bare.lower()
        return to_json(text)

    def _fits(self, value: object) -> bool:
        """Whether a converted value has a type that the schema allows; without a schema, any type but text."""
        kind = _TYPES[type(value)]
        if not self.kinds:
            return kind != "string"
        return kind in self.kinds or (kind == "integer" and "number" in self.kinds)


_TYPES = {
    bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", dict: "object", list: "array",
}  # fmt: skip
