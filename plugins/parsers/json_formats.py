"""Tool parsers whose calls are JSON objects after a few markers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

from frame.interfaces import CallTags, OutputReader, ParserRequest

from .call_tags import TemplateCalls
from .frames import COHERE_FRAME, Frame, FramedReader
from .json_calls import KEYS, JsonCallReader


class JsonParser(TemplateCalls):
    """Calls as JSON objects after a marker, one or a list of them. A subclass gives the markers.

    `bare`: the output may also begin with such JSON without a marker. `keys` as for `JsonCallReader`. `frame` holds the
    tags around the answer.
    """

    begin: ClassVar[Sequence[str]] = ()
    closers: ClassVar[Sequence[str]] = ()
    bare: ClassVar[bool] = False
    keys: ClassVar[tuple[Sequence[str], Sequence[str]] | None] = KEYS
    frame: ClassVar[Frame] = Frame()

    def tokens(self) -> Sequence[str]:
        """The special tokens among its markers."""
        return (*self.begin, *self.closers, *self.frame.begin, *self.frame.end)

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of JSON calls."""
        reader = JsonCallReader(request, begin=self.begin, closers=self.closers, bare=self.bare, keys=self.keys)
        return FramedReader(reader, self.frame) if self.frame != Frame() else reader


class HermesParser(JsonParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5, Qwen3 and many others."""

    begin = ("<tool_call>",)
    closers = ("</tool_call>",)


class XlamParser(JsonParser):
    """`[{"name": …, "arguments": {…}}]` as the whole output, or after a marker: xLAM 2."""

    begin = ("[TOOL_CALLS]", "<tool_call>")
    closers = ("</tool_call>",)
    bare = True


class ApertusParser(JsonParser):
    """`<|tools_prefix|>[{"NAME": {…}}]<|tools_suffix|>`: Apertus."""

    begin = ("<|tools_prefix|>",)
    closers = ("<|tools_suffix|>",)
    keys = None


class CohereCommandParser(JsonParser):
    """`<|START_ACTION|>[{"tool_call_id": "0", "tool_name": …, "parameters": {…}}]<|END_ACTION|>`: Cohere's Command A.

    The ids count from 0 in every answer, so that calls get other ones.
    """

    begin = ("<|START_ACTION|>",)
    closers = ("<|END_ACTION|>",)
    keys = (("tool_name",), ("parameters",))
    frame = COHERE_FRAME


class GigaChat3Parser(JsonParser):
    """`function call<|role_sep|>` or `<|function_call|>`, and `{"name": …, "arguments": {…}}`: GigaChat 3 and 3.1."""

    begin = ("function call<|role_sep|>", "<|function_call|>")
    closers = ("<|message_sep|>",)
    frame = Frame(end=("<|message_sep|>",), special=True)

    def tokens(self) -> Sequence[str]:
        """The tokens that its markers are made of."""
        return ("<|role_sep|>", "<|function_call|>", "<|message_sep|>")

    def call_tags(self, request: ParserRequest) -> CallTags | None:
        """Calls as the template writes them. The token before a call also ends an answer, so that it is no trigger."""
        tags = super().call_tags(request)
        if tags is None:
            return None
        head = tags.opener or tags.tags[0]["begin"]
        ends = [head.index(text) + len(text) for text in self.begin if text in head]
        return replace(tags, trigger=head[: ends[0]] if ends else tags.trigger)


class Llama3JsonParser(JsonParser):
    """`{"name": …, "parameters": {…}}` as the whole output, several with `;` between: Llama 3.1 to 3.3."""

    begin = ("<|python_tag|>",)
    bare = True


class GraniteParser(JsonParser):
    """`<|tool_call|>[{…}]` or `<tool_call>[{…}]`: Granite 3."""

    begin = ("<|tool_call|>", "<tool_call>")
    closers = ("</tool_call>",)


class JambaParser(JsonParser):
    """`<tool_calls>[{…}]</tool_calls>`: Jamba; also LongCat and Hunyuan, with their own tags."""

    begin = ("<tool_calls>", "<longcat_tool_call>")
    closers = ("</tool_calls>", "</longcat_tool_call>")


class Phi4MiniParser(JsonParser):
    """`functools[{…}]`: Phi-4-mini."""

    begin = ("functools", "<|tool_call|>")
    closers = ("<|/tool_call|>",)


class InternLmParser(JsonParser):
    """`<|action_start|><|plugin|>{…}<|action_end|>`: InternLM 2.5 and 3."""

    begin = ("<|action_start|><|plugin|>",)
    closers = ("<|action_end|>",)

    def tokens(self) -> Sequence[str]:
        """The tokens that its markers are made of."""
        return ("<|action_start|>", "<|plugin|>", "<|action_end|>")


class Granite20bParser(JsonParser):
    """`<function_call> {…}`, each call after a marker: Granite 20B function calling."""

    begin = ("<function_call>",)
