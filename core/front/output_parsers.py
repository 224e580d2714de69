"""The parsers of a server: those that the settings name, else those that suit the model. Knows no parser by name."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any

from ..interfaces.errors import RequestError
from ..interfaces.parser import ParserRequest, ReasoningParser, ToolParser
from ..interfaces.setup import ParserSetup
from ..interfaces.tokenizer import ChatOptions
from ..plugin_host.offers import PluginError
from ..plugin_host.registry import Registry
from .tools import read_tools
from .turn import AssistantTurn

if TYPE_CHECKING:
    from ..interfaces.provider import Provider
    from .front import Front

logger = logging.getLogger(__name__)

#: Tag `models` of the tool parser that infers the format of calls from the chat template.
_ANY_MODEL = "*"


@dataclass(frozen=True)
class OutputParsers:
    """The parsers of a server.

    `tools` and `reasoning` read the model's own formats. `forced` gives the grammar of demanded calls, and reads those
    calls, where `tools` has no grammar. `auto`: the model may choose to call. Where `tools` is None, the first request
    with tools asks `find_tools` for the parser, which is None when there is none. `exclude_when_none`: the tools are
    hidden from the model when the request's tool choice is "none". `token_id` finds a special token by its text;
    `encode` tokenises a text without special tokens around it.
    """

    tools: ToolParser | None = None
    reasoning: ReasoningParser | None = None
    forced: ToolParser | None = None
    auto: bool = False
    exclude_when_none: bool = True
    find_tools: Callable[[], ToolParser | None] = lambda: None
    token_id: Callable[[str], int | None] = lambda text: None
    encode: Callable[[str], list[int]] = lambda text: []
    #: classes of parsers that were asked for strict calls and have no grammar of them
    not_strict: set[str] = field(default_factory=set)

    def cannot_be_strict(self, parser: ToolParser) -> None:
        """Logs once that `strict: true` has no effect on calls that the model decides to make in this format."""
        name = type(parser).__name__
        if name not in self.not_strict:
            self.not_strict.add(name)
            logger.warning(
                "strict tools: %s has no grammar of calls, so arguments may break the schemas of tools with strict: "
                "true; tool_choice 'required' or a named tool holds them to it",
                name,
            )

    def turn(
        self,
        *,
        tools: Sequence[Any] | None = None,
        tool_choice: Any = None,
        parallel: bool = True,
        include_reasoning: bool = True,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> AssistantTurn:
        """The turn of one request; raises `RequestError` 400 naming what is wrong with its tools."""
        choice = read_tools(tools, tool_choice)
        callable_tools = bool(choice.tools) and not choice.none
        found = replace(self, tools=self.find_tools()) if callable_tools and self.tools is None else self
        if callable_tools and not choice.must_call and (found.tools is None or not self.auto):
            why = "the server was started with --no-enable-auto-tool-choice"
            if self.auto:
                why = (
                    "the model's chat template writes no tool calls that could be found; "
                    "name their format (--tool-call-parser)"
                )
            raise RequestError(400, f"tool_choice 'auto' is not served: {why}", param="tool_choice")
        request = ParserRequest(
            tools=() if choice.none else choice.tools,
            must_call=choice.must_call,
            parallel=parallel,
            template_kwargs=template_kwargs or {},
        )
        return AssistantTurn(found, request, choice, include_reasoning)


def build_parsers(front: Front) -> OutputParsers:
    """The parsers that the configuration of `front` names or its model needs; raises `PluginError`."""
    config, registry, tokenizer = front.config, front.source.registry, front.source.get_or_none()
    server = config.server

    def render(messages: Sequence[Any], **options: Any) -> str:
        return front.render_chat(messages, ChatOptions(**options)).text or ""

    def make(kind: str, name: str | Provider | None) -> Any:
        setup = ParserSetup(render if tokenizer else None)
        return None if name is None else registry.make(kind, name, setup, config)

    def suited() -> Any:
        provider = _suited_parser(registry, front)
        if provider is not None:
            logger.info("tool parser: %s, by the model type %s", provider.name, front.checkpoint.model_type)
        return make("tool-parser", provider)

    @cache
    def find_tools() -> Any:
        if server.tool_call_parser != "auto":
            return None
        try:
            offered = registry.providers("tool-parser")
            return make("tool-parser", next((one for one in offered if one.tags.get("models") == _ANY_MODEL), None))
        except (PluginError, ValueError) as error:
            logger.warning("no tool parser for this model: %s", error)
            return None

    by_tokenizer: dict[str, Any] = {}
    if tokenizer is not None:
        encode = partial(tokenizer.encode, add_special_tokens=False)
        by_tokenizer = {"token_id": tokenizer.token_id, "encode": encode}
    named = None if server.tool_call_parser == "none" else server.tool_call_parser
    return OutputParsers(
        tools=suited() if named == "auto" else make("tool-parser", named),
        find_tools=find_tools,
        reasoning=make("reasoning-parser", server.reasoning_parser),
        forced=make("tool-parser", server.forced_call_parser),
        auto=server.enable_auto_tool_choice,
        exclude_when_none=server.exclude_tools_when_tool_choice_none,
        **by_tokenizer,
    )


def _suited_parser(registry: Registry, front: Front) -> Provider | None:
    """The tool parser that was written for the model, or None.

    A provider's tag `models` lists model types, as config.json has them, and its tag `marker` a text of their chat
    templates: a model whose chat template lacks that text writes its calls in another format than its family.
    """
    model_type, template = front.checkpoint.model_type, _template_text(front)
    for provider in registry.providers("tool-parser"):
        named = model_type in provider.tags.get("models", "").split()
        if named and (not template or provider.tags.get("marker", "") in template):
            return provider
    return None


def _template_text(front: Front) -> str:
    """The chat template that is used, all of them where a tokenizer has several; "" without one."""
    tokenizer = front.source.get_or_none()
    template: Any = front.chat_template
    if template is None and tokenizer is not None:
        template = tokenizer.chat_template
    if isinstance(template, Mapping):
        return "\n".join(map(str, template.values()))
    return template if isinstance(template, str) else ""
