"""Every default parser: golden outputs, and the same events however a text is cut into pieces."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.registry import Registry
from frame.interfaces import (
    AssistantMessage,
    CallArguments,
    CallBegin,
    Content,
    OutputEvent,
    ParserRequest,
    ParserSetup,
    Reasoning,
    joined,
)
from tests.parsers.golden import BROKEN, CASES, REASONING, TOOLS

pytestmark = pytest.mark.product

QUICK = settings(max_examples=25, deadline=None, suppress_health_check=list(HealthCheck))


def render(messages: Any, *, tools: Any = None, add_generation_prompt: bool = True, **_: Any) -> str:
    text = ""
    for message in messages:
        text += f"<|{message['role']}|>{message.get('content') or ''}"
        for call in message.get("tool_calls") or ():
            text += f"<call>{json.dumps(call['function'])}</call>"
    return text


@cache
def parser(kind: str, name: str) -> Any:
    registry = Registry.load()
    return registry.make(kind, name, ParserSetup(render), FrameConfig())


def read(parser: Any, pieces: list[str], prompt: str = "") -> list[OutputEvent]:
    reader = parser.start(ParserRequest(tools=TOOLS, prompt=prompt))
    events: list[OutputEvent] = []
    for piece in pieces:
        events += reader.feed(piece, ())
    return joined([*events, *reader.finish()])


def message(events: list[OutputEvent]) -> AssistantMessage:
    found = AssistantMessage()
    found.add(events)
    return found


GOLDEN = [(name, case) for name, cases in CASES.items() for case in cases]


@pytest.mark.parametrize(("name", "case"), GOLDEN, ids=[f"{name}-{number}" for number, (name, _) in enumerate(GOLDEN)])
def test_golden_outputs(name: str, case: Any) -> None:
    for pieces in ([case.text], list(case.text)):
        said = message(read(parser("tool-parser", name), pieces))
        assert [(call.name, json.loads(call.arguments)) for call in said.calls] == case.calls
        assert (said.content, said.reasoning) == (case.content, case.reasoning)
        if case.ids is not None:
            assert [call.id for call in said.calls] == case.ids


@pytest.mark.parametrize(
    ("name", "text", "calls", "content"), [(name, *one) for name in BROKEN for one in BROKEN[name]]
)
def test_a_broken_call_ends_at_its_marker(name: str, text: str, calls: list[tuple[str, str]], content: str) -> None:
    for pieces in ([text], list(text)):
        said = message(read(parser("tool-parser", name), pieces))
        assert [(call.name, call.arguments) for call in said.calls] == calls
        assert said.content == content


THOUGHTS = [(name, *case) for name, cases in REASONING.items() for case in cases]


@pytest.mark.parametrize(("name", "prompt", "text", "reasoning", "content"), THOUGHTS)
def test_golden_reasoning(name: str, prompt: str, text: str, reasoning: str, content: str) -> None:
    for pieces in ([text], list(text)):
        said = message(read(parser("reasoning-parser", name), pieces, prompt))
        assert (said.reasoning, said.content, said.calls) == (reasoning, content, [])


MARKERS = [
    "\n", " ", '"', '" string="true">', '">', '"arguments": ', '"get_weather"', '"name": ', "'", "'''", "(", ")", ",",
    "3", ": ", "</arg_key>", "</arg_value>", "</call>", "</function>", "</parameter>", "</think>", "</tool_call>",
    "</｜DSML｜invoke>", "</｜DSML｜parameter>", "<arg_key>", "<arg_value>", "<call>", "<function=", "<parameter=",
    "<think>", "<tool_call>", "<|call|>", "<|channel|>", "<|end|>", "<|message|>", "<|python_end|>",
    "<|python_start|>", "<|python_tag|>", "<|start|>assistant", "<|tool_call_argument_begin|>", "<|tool_call_begin|>",
    "<|tool_call_end|>", "<|tool_calls_section_begin|>", '<｜DSML｜invoke name="', '<｜DSML｜parameter name="',
    "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>", "<｜tool▁sep｜>",
    ">", "[", "[/THINK]", "[ARGS]", "[CALL_ID]", "[THINK]", "[TOOL_CALLS]", "\\", "]", "```json\n", "analysis",
    "city", "city=", "commentary to=functions.get_weather", "final", "function<｜tool▁sep｜>", "functions.",
    "functools", "get_weather", "null", "x", "{", "}", "日本 😀",
    '<|"|>', "<|tool_call>call:", "<tool_call|>", "call:get_weather{", "city:", "<escape>", "<end_function_call>",
    "]<]minimax[>[<city>", "]<]minimax[>[</city>", "]<]minimax[>[</invoke>", "]<]minimax[>[</tool_call>",
    "]<]minimax[>[", "<|open|>", "<|close|>", "<|sep|>", "<|close|>argument<|sep|>", "<|close|>response<|sep|>",
    "<|open|>tools<|sep|>", "<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>",
    "<|tools_prefix|>", "<|tools_suffix|>", "<|message_sep|>", "function call<|role_sep|>", "<｜tool_call_end｜>",
    "</steptml:parameter>", "</steptml:invoke>", "<answer>", "</answer>", "<response>", "</response>",
    "<|channel>thought\n", "<channel|>", "<mm:think>", "</mm:think>",
]  # fmt: skip
SOUP = st.lists(st.one_of(st.sampled_from(MARKERS), st.text(max_size=5)), max_size=30).map("".join)


@st.composite
def cut(draw: st.DrawFn, texts: st.SearchStrategy[str]) -> tuple[str, list[str]]:
    """A text and pieces of it."""
    text = draw(texts)
    places = sorted(draw(st.lists(st.integers(0, len(text)), max_size=12)))
    return text, [text[a:b] for a, b in zip([0, *places], [*places, len(text)], strict=True)]


def near_golden(cases: list[str]) -> st.SearchStrategy[str]:
    """Golden texts, of which some lack characters or hold a marker in a wrong place; and random markers and text."""

    @st.composite
    def damaged(draw: st.DrawFn) -> str:
        text = draw(st.sampled_from(cases))
        at = draw(st.integers(0, len(text)))
        return text[:at] + draw(st.sampled_from(["", *MARKERS])) + text[at + draw(st.integers(0, 3)) :]

    return st.one_of(damaged(), SOUP)


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_text_in_pieces_gives_the_events_of_the_whole_text(name: str) -> None:
    found = parser("tool-parser", name)

    @QUICK
    @given(cut(near_golden([*(case.text for case in CASES[name]), *(one[0] for one in BROKEN.get(name, ()))])))
    def check(example: tuple[str, list[str]]) -> None:
        text, pieces = example
        whole = read(found, [text])
        assert read(found, pieces) == whole
        assert read(found, list(text)) == whole

    check()


@pytest.mark.parametrize("name", sorted(REASONING))
@pytest.mark.parametrize("prompt", ["", "<think>\n", "</think>\n"])
def test_reasoning_in_pieces_gives_the_events_of_the_whole_text(name: str, prompt: str) -> None:
    found = parser("reasoning-parser", name)

    @QUICK
    @given(cut(near_golden([text for _, text, _, _ in REASONING[name]])))
    def check(example: tuple[str, list[str]]) -> None:
        text, pieces = example
        whole = read(found, [text], prompt)
        assert read(found, pieces, prompt) == whole
        assert read(found, list(text), prompt) == whole

    check()


@pytest.mark.parametrize("name", sorted(CASES))
def test_no_word_is_lost(name: str) -> None:
    """Characters that are no part of any format come out, in order, wherever they stand."""
    found = parser("tool-parser", name)
    words = st.lists(st.one_of(st.sampled_from(MARKERS), st.sampled_from(["@", "§", "ß", "Ω"])), max_size=25)

    @QUICK
    @given(words.map("".join))
    def check(text: str) -> None:
        said = "".join(
            event.text if isinstance(event, (Content, Reasoning, CallArguments)) else getattr(event, "name", "")
            for event in read(found, [text])
        )
        for mark in "@§ßΩ":
            kept = said.count(mark)
            assert kept <= text.count(mark)
            if "<" not in text and "[" not in text and "{" not in text and "functools" not in text:
                assert kept == text.count(mark)

    check()


@pytest.mark.parametrize("name", sorted(CASES))
def test_arguments_are_complete_json_when_the_call_ends(name: str) -> None:
    """Calls of values of every kind, as the parser's own golden texts write them, give JSON that parses."""
    for case in CASES[name]:
        for event in read(parser("tool-parser", name), [case.text]):
            if isinstance(event, CallArguments):
                assert isinstance(json.loads(event.text), dict)
            if isinstance(event, CallBegin):
                assert event.name in ("get_weather", "get_time", "search", "other", "loose")


@pytest.mark.parametrize("name", sorted(CASES))
def test_arguments_stream(name: str) -> None:
    """A call begins before its arguments are complete, which come in pieces."""
    text = Registry.load().choose("tool-parser", name).tags["example"]
    reader = parser("tool-parser", name).start(ParserRequest(tools=TOOLS))
    begun = None
    pieces = 0
    for position, character in enumerate(text):
        for event in reader.feed(character):
            begun = position if isinstance(event, CallBegin) else begun
            pieces += isinstance(event, CallArguments)
    assert begun is not None
    assert begun < text.rindex("3")
    assert pieces > 2


@pytest.mark.parametrize("depth", [60, 900, 990, 1100, 200_000])
def test_deeply_nested_values_raise_nothing(depth: int) -> None:
    for name in ("qwen3_coder", "pythonic", "hermes", "openai"):
        deep = "[" * depth + "]" * depth
        text = {
            "qwen3_coder": f"<function=get_weather>\n<parameter=hours>\n{deep}\n</parameter>\n</function>",
            "pythonic": f"[get_weather(hours={deep})]",
            "hermes": f'<tool_call>{{"arguments": "{deep}", "name": "get_weather"}}</tool_call>',
            "openai": f"<|channel|>commentary to=functions.get_weather<|message|>{deep}",
        }[name]
        read(parser("tool-parser", name), [text])


@pytest.mark.parametrize(
    ("kind", "name", "tokens"),
    [
        ("tool-parser", "apertus", {"<|tools_prefix|>", "<|tools_suffix|>"}),
        ("tool-parser", "cohere_command3", {"<|START_ACTION|>", "<|END_ACTION|>", "<|START_RESPONSE|>"}),
        ("tool-parser", "deepseek_v4", {"｜DSML｜"}),
        ("tool-parser", "functiongemma", {"<start_function_call>", "<end_function_call>", "<escape>"}),
        ("tool-parser", "gemma4", {"<|tool_call>", "<tool_call|>", '<|"|>'}),
        ("tool-parser", "gigachat3", {"<|role_sep|>", "<|function_call|>", "<|message_sep|>"}),
        ("tool-parser", "kimi_k3", {"<|open|>", "<|close|>", "<|sep|>"}),
        ("tool-parser", "lfm2", {"<|tool_call_start|>", "<|tool_call_end|>"}),
        ("tool-parser", "minimax_m3", {"]<]minimax[>[", "<tool_call>", "</tool_call>"}),
        (
            "tool-parser",
            "step3",
            {"<｜tool_calls_begin｜>", "<｜tool_call_begin｜>", "<｜tool_sep｜>", "<｜tool_call_end｜>"},
        ),
        ("reasoning-parser", "gemma4", {"<|channel>", "<channel|>"}),
        ("reasoning-parser", "kimi_k3", {"<|open|>", "<|close|>", "<|sep|>"}),
        ("reasoning-parser", "cohere_command3", {"<|START_THINKING|>", "<|END_THINKING|>", "<|END_RESPONSE|>"}),
    ],
)
def test_special_tokens_of_a_format_stay_in_the_text(kind: str, name: str, tokens: set[str]) -> None:
    assert tokens <= set(parser(kind, name).tokens())


TURNS = [
    (
        "kimi_k3", "kimi_k3", "<|open|>think<|sep|>",
        "Hm.<|close|>think<|sep|><|open|>response<|sep|>Ok.<|close|>response<|sep|><|open|>tools<|sep|>"
        '<|open|>call tool="get_time" index="1"<|sep|><|close|>call<|sep|><|close|>tools<|sep|><|close|>message<|sep|>',
    ),
    (
        "cohere_command3", "cohere_command3", "",
        "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Ok.<|END_RESPONSE|>"
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "get_time", "parameters": {}}]<|END_ACTION|>',
    ),
    ("gemma4", "gemma4", "", "<|channel>thought\nHm.\n<channel|>Ok.<|tool_call>call:get_time{}<tool_call|>"),
    (
        "minimax_m3", "minimax_m3", "<mm:think>",
        "Hm.</mm:think>Ok.]<]minimax[>[<tool_call>\n]<]minimax[>[<invoke name=\"get_time\">]<]minimax[>[</invoke>\n"
        "]<]minimax[>[</tool_call>",
    ),
    (
        "hunyuan_a13b", "hunyuan_a13b", "",
        "<think>\nHm.\n</think>\n<answer>\nOk."
        '<tool_calls>[{"name": "get_time", "arguments": {}}]</tool_calls>\n</answer>',
    ),
    (
        "apertus", "apertus", "",
        '<|inner_prefix|>Hm.<|inner_suffix|>Ok.<|tools_prefix|>[{"get_time": {}}]<|tools_suffix|>',
    ),
    ("step3p5", "step3p5", "", "Hm.\n</think>\nOk.\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>"),
    ("mimo", "mimo", "<think>", "Hm.</think>Ok.<tool_call>\n<function=get_time>\n</function>\n</tool_call>"),
]  # fmt: skip


@pytest.mark.parametrize(("reasoning", "tools", "prompt", "text"), TURNS, ids=[turn[0] for turn in TURNS])
def test_reasoning_content_and_calls_of_one_answer(reasoning: str, tools: str, prompt: str, text: str) -> None:
    for pieces in ([text], list(text)):
        request = ParserRequest(tools=TOOLS, prompt=prompt)
        first, second = (
            parser("reasoning-parser", reasoning).start(request),
            parser("tool-parser", tools).start(request),
        )
        said = AssistantMessage()
        for found in [first.feed(piece) for piece in pieces] + [first.finish()]:
            for event in found:
                said.add(second.feed(event.text) if isinstance(event, Content) else [event])
        said.add(second.finish())
        assert (said.reasoning, said.content) == ("Hm.", "Ok.")
        assert [(call.name, call.arguments) for call in said.calls] == [("get_time", "{}")]
