"""XTML, the format of Kimi K3: tags of three tokens with attributes, and the answer in a tag of its own.

`<|open|>response<|sep|>…<|close|>response<|sep|><|open|>tools<|sep|><|open|>call tool="NAME" index="1"<|sep|>
<|open|>argument key="KEY" type="string"<|sep|>…<|close|>argument<|sep|><|close|>call<|sep|><|close|>tools<|sep|>`.
"""

from __future__ import annotations

from collections.abc import Sequence

from frame.interfaces import OutputReader, ParserRequest

from .formats import TaggedParser
from .frames import Frame, FramedReader
from .tagged_calls import TaggedCallReader, TaggedFormat
from .thinking import TagParser

_TOKENS = ("<|open|>", "<|close|>", "<|sep|>")
_KINDS = ("string", "number", "integer", "boolean", "null", "object", "array")
FRAME = Frame(
    begin=("<|open|>response<|sep|>",), end=("<|close|>response<|sep|>", "<|close|>message<|sep|>"), special=True
)


class XtmlCallReader(TaggedCallReader):
    """Reads calls whose name and keys are attributes."""

    def name_of(self, head: str) -> str:
        """The attribute `tool`, whose beginning belongs to the marker."""
        return _plain(head.partition('"')[0])

    def key_of(self, text: str) -> str:
        """The attribute `key`, whose beginning belongs to the marker."""
        return _plain(text.partition('"')[0])


def _plain(value: str) -> str:
    """An attribute's value without its escapes."""
    return value.replace("&quot;", '"').replace("&amp;", "&")


class KimiK3Parser(TaggedParser):
    """Calls in XTML: Kimi K3."""

    form = TaggedFormat(
        begin=('<|open|>call tool="',), name_end="<|sep|>", attributes='" index="1"',
        key_begin='<|open|>argument key="', key_end="<|sep|>",
        typed_key_ends=tuple((f'" type="{kind}"<|sep|>', kind == "string") for kind in _KINDS),
        value_end="<|close|>argument<|sep|>", end="<|close|>call<|sep|>", opener=("<|open|>tools<|sep|>",),
        closers=("<|close|>tools<|sep|>",), line="",
    )  # fmt: skip

    def tokens(self) -> Sequence[str]:
        """The tokens that its tags are made of."""
        return _TOKENS

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of calls; the tags of the answer are no part of it."""
        return FramedReader(XtmlCallReader(request, self.form), FRAME)


class KimiK3ThinkParser(TagParser):
    """`<|open|>think<|sep|>…<|close|>think<|sep|>`: Kimi K3."""

    begin = "<|open|>think<|sep|>"
    close = "<|close|>think<|sep|>"
    calls = ("<|open|>tools<|sep|>",)
    frame = FRAME

    def tokens(self) -> Sequence[str]:
        """The tokens that its tags are made of."""
        return _TOKENS
