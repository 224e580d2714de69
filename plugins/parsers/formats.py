"""Tool parsers whose format is a matter of markers: each a few lines over the readers of its family."""

from __future__ import annotations

from frame.interfaces import OutputReader, ParserRequest, ToolParser

from .json_calls import JsonCallReader


class HermesParser(ToolParser):
    """`<tool_call>{"name": …, "arguments": {…}}</tool_call>`: Hermes, Qwen 2.5, Qwen3 and many others."""

    special_tokens = ("<tool_call>", "</tool_call>")

    def start(self, request: ParserRequest) -> OutputReader:
        """A reader of tagged JSON."""
        return JsonCallReader(request, begin=("<tool_call>",), closers=("</tool_call>",))
