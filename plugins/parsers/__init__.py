"""The default parsers of tool calls and of reasoning."""

from __future__ import annotations

from frame import Provider, hookimpl

_API = ">=0.1,<0.2"
_ARGUMENTS = '{"city": "Paris", "days": 3}'
_JSON = f'{{"name": "get_weather", "arguments": {_ARGUMENTS}}}'
_THOUGHT, _SAID = "The user is in Paris.", "It rains."


def _provider(name: str, target: str, summary: str, example: str, *aliases: str) -> Provider:
    """`example` is an output in the parser's format, for the contract suite."""
    tags = {"example": example}
    return Provider(name, f"frame.plugins.parsers.{target}", api=_API, summary=summary, aliases=aliases, tags=tags)


@hookimpl
def frame_tool_parsers() -> list[Provider]:
    """By the model's format of calls, under the names that vLLM uses."""
    return [
        _provider("json", "json_list:JsonListParser", "a JSON list; what demanded calls are written as", f"[{_JSON}]"),
        _provider("hermes", "formats:HermesParser", "Hermes, Qwen 2.5, Qwen3", f"<tool_call>\n{_JSON}\n</tool_call>"),
    ]


@hookimpl
def frame_reasoning_parsers() -> list[Provider]:
    """By the model's tags, under the names that vLLM uses."""
    said = f"\n</think>\n\n{_SAID}"
    return [
        _provider("qwen3", "thinking:ThinkParser", "Qwen3, GLM-4.5: <think>…", f"<think>\n{_THOUGHT}{said}", "glm45"),
        _provider("deepseek_r1", "thinking:ImplicitThinkParser", "DeepSeek-R1: …</think>", _THOUGHT + said),
        _provider("mistral", "thinking:MistralThinkParser", "Magistral", f"[THINK]{_THOUGHT}[/THINK]{_SAID}"),
        _provider("seed_oss", "thinking:SeedThinkParser", "Seed-OSS", f"<seed:think>{_THOUGHT}</seed:think>{_SAID}"),
    ]
