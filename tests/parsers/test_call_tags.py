"""How the chat templates of models write calls, read off for grammars that must let them call."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from frame.core.config.tree import FrameConfig
from frame.core.plugin_host.registry import Registry
from frame.interfaces import ParserRequest, ParserSetup, Tool

STRICT = Tool("f", {"properties": {"a": {"type": "integer"}}, "required": ["a"]}, strict=True)
LOOSE = Tool("g", {"properties": {"a": {"type": "integer"}}})
OBJECT = "{{ {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}"
HEAD = "{% for m in messages %}<|{{ m.role }}|>{{ m.content or '' }}"
TAIL = "<|end|>{% endfor %}"


def render_with(calls: str) -> Any:
    environment = jinja2.Environment()  # noqa: S701 (no HTML)
    environment.policies["json.dumps_kwargs"] = {"sort_keys": False}
    environment.filters["tojson"] = json.dumps

    def fail(text: str) -> None:
        raise ValueError(text)

    environment.globals["raise_exception"] = fail
    template = environment.from_string(HEAD + calls + TAIL)
    return lambda messages, **options: template.render(messages=messages, **options)


def each(text: str, before: str = "", after: str = "") -> str:
    return f"{{% if m.tool_calls %}}{before}{{% for call in m.tool_calls %}}{text}{{% endfor %}}{after}{{% endif %}}"


HERMES = each("{% if not loop.first %}\n{% endif %}<tool_call>\n" + OBJECT + "\n</tool_call>")
LIST = each(OBJECT + "{% if not loop.last %}, {% endif %}", "[TOOL_CALLS] [", "]")
WITH_IDS = each("{{ call.function.name }}[CALL_ID]{{ call.id }}[ARGS]{{ call.function.arguments | tojson }}").replace(
    "{{ call.function.name }}", "[TOOL_CALLS]{{ call.function.name }}"
)
KIMI = each(
    "<|tool_call_begin|>functions.{{ call.function.name }}:{{ loop.index0 }}<|tool_call_argument_begin|>"
    "{{ call.function.arguments | tojson }}<|tool_call_end|>",
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
)
ONE = "{% if m.tool_calls and m.tool_calls | length > 1 %}{{ raise_exception('only one') }}{% endif %}" + each(
    "{{ {'name': call.function.name, 'parameters': call.function.arguments} | tojson }}"
)
APERTUS = each(
    '{"{{ call.function.name }}": {{ call.function.arguments | tojson }}}{% if not loop.last %}, {% endif %}',
    "<|tools_prefix|>[",
    "]<|tools_suffix|>",
)
COHERE = each(
    '\n    {"tool_call_id": "{{ loop.index0 }}", "tool_name": "{{ call.function.name }}", "parameters": '
    "{{ call.function.arguments | tojson }}}{% if not loop.last %},{% endif %}",
    "<|START_ACTION|>[",
    "\n]<|END_ACTION|>",
)
COHERE_IDS = COHERE.replace("{{ loop.index0 }}", "{{ call.id }}")
GIGACHAT = each("<|message_sep|>\n\nfunction call<|role_sep|>\n" + OBJECT)
TAGGED = each(
    "<tool_call>\n<function={{ call.function.name }}>\n{% for k, v in call.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}</function>\n</tool_call>"
)


@pytest.mark.parametrize(
    ("name", "template", "want"),
    [
        (
            "hermes",
            HERMES,
            ("", '<tool_call>\n{"name": "f", "arguments": ', "}\n</tool_call>", "\n", "", "<tool_call>"),
        ),
        ("mistral", LIST, ("[TOOL_CALLS] [", '{"name": "f", "arguments": ', "}", ", ", "]", "[TOOL_CALLS]")),
        ("mistral", WITH_IDS, ("", "[TOOL_CALLS]f[ARGS]", "", "", "", "[TOOL_CALLS]")),
        (
            "kimi_k2",
            KIMI,
            ("<|tool_calls_section_begin|>", "<|tool_call_begin|>functions.f:", "<|tool_call_end|>", "",
             "<|tool_calls_section_end|>", "<|tool_calls_section_begin|>"),
        ),
        ("apertus", APERTUS, ("<|tools_prefix|>[", '{"f": ', "}", ", ", "]<|tools_suffix|>", "<|tools_prefix|>")),
        (
            "cohere_command3", COHERE_IDS,
            ("<|START_ACTION|>[", '\n    {"tool_name": "f", "parameters": ', "}", ",", "\n]<|END_ACTION|>",
             "<|START_ACTION|>"),
        ),
        (
            "gigachat3", GIGACHAT,
            ("", '<|message_sep|>\n\nfunction call<|role_sep|>\n{"name": "f", "arguments": ', "}", "", "",
             "<|message_sep|>\n\nfunction call<|role_sep|>"),
        ),
        ("llama3_json", ONE, ("", '{"name": "f", "parameters": ', "}", None, "", '{"name": "')),
        ("template", each(OBJECT, after=""), ("", '{"name": "f", "arguments": ', "}", "", "", '{"name": "')),
    ],
)  # fmt: skip
def test_tags_are_what_the_template_writes(name: str, template: str, want: Any) -> None:
    parser = Registry.load().make("tool-parser", name, ParserSetup(render_with(template)), FrameConfig())
    found = parser.call_tags(ParserRequest(tools=(STRICT, LOOSE)))
    assert found is not None
    first, second = found.tags
    assert (found.opener, first["begin"], first["end"], found.separator, found.closer, found.trigger) == want
    schemas = [tag["content"].get("elements", [tag["content"]])[-1]["json_schema"] for tag in (first, second)]
    assert schemas == [{"type": "object", **STRICT.parameters}, {"type": "object"}]


def test_formats_without_json_have_no_such_tags() -> None:
    parser = Registry.load().make("tool-parser", "template", ParserSetup(render_with(TAGGED)), FrameConfig())
    assert parser.call_tags(ParserRequest(tools=(STRICT,))) is None
    alone = Registry.load().make("tool-parser", "hermes", ParserSetup(), FrameConfig())
    assert alone.call_tags(ParserRequest(tools=(STRICT,))) is None
