"""The default parsers of tool calls and of reasoning."""

from __future__ import annotations

from frame import Provider, hookimpl

from .names import MODELS, REASONING_PARSERS, TOOL_PARSERS


def _provider(name: str, target: str, summary: str, example: str, *aliases: str, choice: int = 0) -> Provider:
    """`example` is an output in the parser's format, for the contract suite. "auto" tries higher `choice` first."""
    tags = {"example": example}
    if choice:
        models, marker = MODELS[name]
        tags |= {"models": models, "marker": marker}
    return Provider(
        name,
        f"frame.plugins.parsers.{target}",
        api=">=0.2.dev1,<0.3",
        summary=summary,
        aliases=aliases,
        preference=choice,
        tags=tags,
    )


@hookimpl
def frame_tool_parsers() -> list[Provider]:
    """One provider for each format in which models write calls, under vLLM's names."""
    rank = {name: len(MODELS) - place for place, name in enumerate(MODELS)}
    return [_provider(name, *rest, choice=rank.get(name, 0)) for name, rest in TOOL_PARSERS.items()]


@hookimpl
def frame_reasoning_parsers() -> list[Provider]:
    """One provider for each pair of tags around reasoning, under vLLM's names."""
    return [_provider(name, *rest) for name, rest in REASONING_PARSERS.items()]
