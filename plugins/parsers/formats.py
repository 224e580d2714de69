"""Tool parsers whose format is described by a few markers, each on top of its family's reader.

Those whose calls are JSON objects are in `json_formats`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from frame.interfaces import CallTags, OutputReader, ParserRequest, StructuredOutputsParams, ToolParser

from .braced_calls import BracedCallReader, BracedFormat
from .braced_tags import braced_tags, plain_keys
from .call_tags import TemplateCalls
from .named_calls import NamedCallReader, NamedFormat
from .tagged_calls import TaggedCallReader, TaggedFormat
from .tagged_tags import demanded_calls, tagged_tags


class NamedParser(TemplateCalls):
    """Calls whose name stands between markers. A subclass gives the format."""

    form: ClassVar[NamedFormat]

    def tokens(self) -> Sequence[str]:
        """The special tokens among its markers."""
        form = self.form
        texts = (*form.begin, *form.opener, *form.separators, *form.closers, form.identifier)
        return tuple(part for text in texts for part in _tokens(text))

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of named calls."""
        return NamedCallReader(request, self.form)


class BracedParser(ToolParser):
    """Calls with arguments in braces and texts between marks. A subclass gives the format."""

    form: ClassVar[BracedFormat]

    def tokens(self) -> Sequence[str]:
        """The special tokens among its markers."""
        form = self.form
        return (*(text.removesuffix("call:") for text in form.begin), form.end, form.quote)

    def call_tags(self, request: ParserRequest) -> CallTags:
        """Calls without white space, whose objects and lists are JSON."""
        return braced_tags(self.form, request.tools)

    def constraint(self, request: ParserRequest) -> StructuredOutputsParams | None:
        """The grammar of answers that are calls; None where it cannot enforce the schemas of all arguments."""
        return demanded_calls(braced_tags(self.form, request.tools), request) if plain_keys(request.tools) else None

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of calls in braces."""
        return BracedCallReader(request, self.form)


class TaggedParser(ToolParser):
    """Calls with each argument in tags. A subclass gives the format."""

    form: ClassVar[TaggedFormat]

    def tokens(self) -> Sequence[str]:
        """The special tokens among its markers."""
        form = self.form
        return (
            *form.begin, *form.opener, *form.closers, form.end, form.key_begin, form.key_end, form.value_begin,
            form.value_end,
        )  # fmt: skip

    def call_tags(self, request: ParserRequest) -> CallTags:
        """Calls with every part on a line of its own."""
        return tagged_tags(self.form, request.tools)

    def constraint(self, request: ParserRequest) -> StructuredOutputsParams | None:
        """The grammar of answers that are calls; None where tags cannot enforce the schemas of all arguments."""
        return demanded_calls(tagged_tags(self.form, request.tools), request)

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of tagged calls."""
        return TaggedCallReader(request, self.form)


def _tokens(text: str) -> list[str]:
    """The special tokens of which a marker may consist."""
    return [text, *(f"<{part}" for part in text.strip().split("<") if part)]


class DeepSeekV3Parser(NamedParser):
    """DeepSeek-V3 and R1: `function`, the name, and JSON in a code block."""

    form = NamedFormat(
        begin=("<｜tool▁call▁begin｜>function<｜tool▁sep｜>",),
        separators=("\n```json",),
        opener=("<｜tool▁calls▁begin｜>",),
        closers=("\n```<｜tool▁call▁end｜>", "```<｜tool▁call▁end｜>", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    )


class DeepSeekV31Parser(NamedParser):
    """DeepSeek-V3.1: the name and plain JSON."""

    form = NamedFormat(
        begin=("<｜tool▁call▁begin｜>",),
        separators=("<｜tool▁sep｜>",),
        opener=("<｜tool▁calls▁begin｜>",),
        closers=("<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>"),
    )


class KimiK2Parser(NamedParser):
    """Kimi K2: the call's id, which holds the name, and JSON."""

    form = NamedFormat(
        begin=("<|tool_call_begin|>",),
        separators=("<|tool_call_argument_begin|>",),
        opener=("<|tool_calls_section_begin|>", "<|tool_call_section_begin|>"),
        closers=("<|tool_call_end|>", "<|tool_calls_section_end|>", "<|tool_call_section_end|>"),
        name_holds_id=True,
    )


class FunctionTagParser(NamedParser):
    """`<function=NAME>{…}</function>`: Functionary 3.1, and Llama 3.1 as it was first described."""

    form = NamedFormat(begin=("<function=",), separators=(">",), closers=("</function>",))


class Qwen3CoderParser(TaggedParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`: Qwen3-Coder."""

    form = TaggedFormat(
        begin=("<function=",), name_end=">", key_begin="<parameter=", key_end=">", value_end="</parameter>",
        end="</function>", opener=("<tool_call>",), closers=("</tool_call>",), padding=True,
    )  # fmt: skip


class SeedOssParser(TaggedParser):
    """As Qwen3-Coder, in `<seed:tool_call>`: Seed-OSS."""

    form = TaggedFormat(
        begin=("<function=",), name_end=">", key_begin="<parameter=", key_end=">", value_end="</parameter>",
        end="</function>", opener=("<seed:tool_call>",), closers=("</seed:tool_call>",), padding=True,
    )  # fmt: skip


class Glm45Parser(TaggedParser):
    """`<tool_call>NAME<arg_key>KEY</arg_key><arg_value>VALUE</arg_value></tool_call>`: GLM-4.5 and later."""

    form = TaggedFormat(
        begin=("<tool_call>",), key_begin="<arg_key>", key_end="</arg_key>", value_begin="<arg_value>",
        value_end="</arg_value>", end="</tool_call>",
    )  # fmt: skip


class Glm47Parser(TaggedParser):
    """As GLM-4.5, without line breaks: GLM-4.7 and later."""

    form = replace(Glm45Parser.form, line="")


class MiMoParser(TaggedParser):
    """As Qwen3-Coder, without line breaks around values: MiMo-V2."""

    form = replace(Qwen3CoderParser.form, padding=False)


class Step3Parser(TaggedParser):
    """`<steptml:invoke name="NAME"><steptml:parameter name="KEY">VALUE</steptml:parameter>…`: Step 3."""

    form = TaggedFormat(
        begin=('<｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="', '<steptml:invoke name="'),
        name_end='">', key_begin='<steptml:parameter name="', key_end='">', value_end="</steptml:parameter>",
        end="</steptml:invoke>", opener=("<｜tool_calls_begin｜>",),
        closers=("<｜tool_call_end｜>", "<｜tool_calls_end｜>"),
    )  # fmt: skip

    def tokens(self) -> Sequence[str]:
        """The tokens that its markers are made of."""
        return (*self.form.opener, "<｜tool_call_begin｜>", "<｜tool_sep｜>", *self.form.closers)


class MiniMaxM2Parser(TaggedParser):
    """`<invoke name="NAME"><parameter name="KEY">VALUE</parameter></invoke>`: MiniMax-M2."""

    form = TaggedFormat(
        begin=('<invoke name="',), name_end='">', key_begin='<parameter name="', key_end='">',
        value_end="</parameter>", end="</invoke>", opener=("<minimax:tool_call>",),
        closers=("</minimax:tool_call>",),
    )  # fmt: skip


class DeepSeekV32Parser(TaggedParser):
    """DeepSeek-V3.2: tags that say of each value whether it is text."""

    form = TaggedFormat(
        begin=('<｜DSML｜invoke name="',), name_end='">', key_begin='<｜DSML｜parameter name="', key_end='">',
        typed_key_ends=(('" string="true">', True), ('" string="false">', False)),
        value_end="</｜DSML｜parameter>", end="</｜DSML｜invoke>", opener=("<｜DSML｜function_calls>",),
        closers=("</｜DSML｜function_calls>",),
    )  # fmt: skip

    def tokens(self) -> Sequence[str]:
        """The markers, and the token that is a part of each."""
        return (*super().tokens(), "｜DSML｜")


class DeepSeekV4Parser(DeepSeekV32Parser):
    """As DeepSeek-V3.2, with another tag around the calls: DeepSeek-V4."""

    form = replace(
        DeepSeekV32Parser.form, opener=("<｜DSML｜tool_calls>",), closers=("</｜DSML｜tool_calls>",)
    )  # fmt: skip


class Gemma4Parser(BracedParser):
    """`<|tool_call>call:NAME{KEY:<|"|>VALUE<|"|>}<tool_call|>`: Gemma 4."""

    form = BracedFormat(begin=("<|tool_call>call:",), end="<tool_call|>", quote='<|"|>')


class FunctionGemmaParser(BracedParser):
    """`<start_function_call>call:NAME{KEY:<escape>VALUE<escape>}<end_function_call>`: FunctionGemma."""

    form = BracedFormat(begin=("<start_function_call>call:",), end="<end_function_call>", quote="<escape>")
