"""The tool parser where the settings name none: chosen by the model type, else by the chat template."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from frame.core.config.tree import FrameConfig
from frame.core.front.output_parsers import build_parsers
from frame.core.front.prompts import ParsedPrompt
from frame.core.interfaces.errors import RequestError
from frame.core.plugin_host.registry import Registry

F = {"type": "function", "function": {"name": "f"}}
HERMES = "{% for call in calls %}<tool_call>{{ call }}</tool_call>{% endfor %}<args-json-object>"


def front(model_type: str, template: Any, rendered: str = "", **settings: Any) -> Any:
    """A front whose chats all render as `rendered`, with the name of a function that was called."""

    def render_chat(messages: Any, options: Any) -> ParsedPrompt:
        calls = messages[-1].get("tool_calls") or ()
        texts = (rendered.replace("NAME", call["function"]["name"]) for call in calls)
        return ParsedPrompt(text="<answer>" + messages[-1]["content"] + "".join(texts) + "<end>")

    tokenizer = SimpleNamespace(
        chat_template=template, token_id=lambda text: None, encode=lambda text, add_special_tokens: [1]
    )
    source = SimpleNamespace(get_or_none=lambda: tokenizer, registry=Registry.load())
    checkpoint = SimpleNamespace(model_type=model_type)
    return SimpleNamespace(
        config=FrameConfig.from_flat(**settings),
        checkpoint=checkpoint,
        source=source,
        chat_template=None,
        render_chat=render_chat,
    )


def chosen(model_type: str, template: Any, **settings: Any) -> str:
    parsers = build_parsers(front(model_type, template, **settings))
    return type(parsers.tools).__name__


@pytest.mark.parametrize(
    ("model_type", "template", "want"),
    [
        ("qwen3", HERMES, "HermesParser"),
        ("qwen3_moe", "<tool_call>\n<function=example>", "Qwen3CoderParser"),
        ("qwen3_moe", {"default": "x", "tool_use": HERMES}, "HermesParser"),
        ("gpt_oss", "<|channel|>", "HarmonyParser"),
        ("deepseek_v3", "<｜tool▁sep｜>", "DeepSeekV31Parser"),
        ("deepseek_v3", "<｜tool▁sep｜>\n```json", "DeepSeekV3Parser"),
        ("kimi_k2", "<|tool_call_begin|>", "KimiK2Parser"),
        ("mistral", "[TOOL_CALLS]", "MistralParser"),
        ("mistral", HERMES, "NoneType"),
        ("apertus", "<|tools_prefix|>[", "ApertusParser"),
        ("cohere2", "<|START_ACTION|>[", "CohereCommandParser"),
        ("deepseek_v3", "function call<|role_sep|>", "GigaChat3Parser"),
        ("deepseek_v4", "<｜DSML｜tool_calls>", "DeepSeekV4Parser"),
        ("gemma3_text", "<start_function_call>call:", "FunctionGemmaParser"),
        ("gemma3_text", "<start_of_turn>", "NoneType"),
        ("gemma4", "<|tool_call>call:", "Gemma4Parser"),
        ("glm4_moe", "<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key>", "Glm47Parser"),
        ("glm4_moe", "<tool_call>{function-name}\n<arg_key>{arg-key-1}</arg_key>", "Glm45Parser"),
        ("granitemoehybrid", HERMES, "HermesParser"),
        ("granite", "<|tool_call|>", "GraniteParser"),
        ("kimi_k3", "<|open|>tools<|sep|>", "KimiK3Parser"),
        ("lfm2", "List of tools: ", "Lfm2Parser"),
        ("llama", "make calls in a single JSON array. Environment: ipython", "XlamParser"),
        ("mimo_v2_flash", "<function=example>", "MiMoParser"),
        ("minimax_m3_vl", "]<]minimax[>[<tool_call>", "MiniMaxM3Parser"),
        ("step3_text", "<steptml:invoke", "Step3Parser"),
        ("step3p5", "<function=example>", "Qwen3CoderParser"),
        ("unheard_of", HERMES, "NoneType"),
    ],
)
def test_the_model_and_its_template_choose(model_type: str, template: Any, want: str) -> None:
    assert chosen(model_type, template) == want


def test_settings_override_the_choice_by_model() -> None:
    assert chosen("qwen3", HERMES, tool_call_parser="mistral") == "MistralParser"
    assert chosen("qwen3", HERMES, tool_call_parser="none") == "NoneType"


def test_other_models_are_asked_through_their_template_when_tools_come() -> None:
    rendered = '<call>{"name": "NAME", "arguments": {"probe_text": "probe value", "probe_number": 4711}}</call>'
    parsers = build_parsers(front("unheard_of", "x", rendered))
    assert parsers.tools is None
    turn = parsers.turn(tools=[F])
    turn.read(
        SimpleNamespace(index=0, text='<call>{"name": "f", "arguments": {}}</call>', token_ids=[], finish_reason="stop")
    )
    assert [call.name for call in turn.message().calls] == ["f"]


def test_a_template_without_calls_is_refused_with_the_remedy() -> None:
    for settings in ({}, {"tool_call_parser": "none"}):
        parsers = build_parsers(front("unheard_of", "x", **settings))
        assert parsers.turn().tools is None
        with pytest.raises(RequestError, match="--tool-call-parser"):
            parsers.turn(tools=[F])
        assert parsers.turn(tools=[F], tool_choice="required").tools == [F]
