"""The template-driven parser over templates of each family, written as models' own templates are."""

from __future__ import annotations

import json
from typing import Any

import jinja2
import pytest

from frame.interfaces import AssistantMessage, ParserRequest, ParserSetup, Tool
from frame.plugins.parsers.template import TemplateParser

HEAD = (
    "{% if tools %}<|system|>{{ tools | tojson }}<|end|>\n{% endif %}{% for message in messages %}"
    "<|{{ message.role }}|>\n{% if message.content %}{{ message.content }}{% endif %}"
)
TAIL = "<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}"


def template(calls: str) -> str:
    return HEAD + calls + TAIL


def each(call: str, before: str = "", after: str = "", between: str = "") -> str:
    separator = f"{{% if not loop.last %}}{between}{{% endif %}}" if between else ""
    return template(
        f"{{% if message.tool_calls %}}{before}{{% for call in message.tool_calls %}}{call}{separator}"
        f"{{% endfor %}}{after}{{% endif %}}"
    )


NAME, ARGUMENTS = "{{ call.function.name }}", "{{ call.function.arguments | tojson }}"
LOOP, KEY, VALUE = "{% for key, value in call.function.arguments.items() %}", "{{ key }}", "{{ value }}"
ENDFOR, JSON, COMMA = "{% endfor %}", "{{ value | tojson }}", "{% if not loop.last %}, {% endif %}"
CODE = "\n```json\n"
PARIS = ("get_weather", {"city": 'Pa"ris {日本}', "days": 3})
TIME = ("get_time", {})

TEMPLATES = {
    "hermes": each(f'<tool_call>\n{{"name": "{NAME}", "arguments": {ARGUMENTS}}}\n</tool_call>', between="\n"),
    "list": each(f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}', "[TOOL_CALLS] [", "]", ", "),
    "bare": each(f'{{"name": "{NAME}", "parameters": {ARGUMENTS}}}', between="; "),
    "list in tags": each(f'{{"name": "{NAME}", "arguments": {ARGUMENTS}}}', "<calls>[", "]</calls>", ", "),
    "other keys": each(f'<call>{{"tool": "{NAME}", "input": {ARGUMENTS}}}</call>'),
    "named": each(f"<|call_begin|>{NAME}<|sep|>{ARGUMENTS}<|call_end|>", "<|calls|>", "<|/calls|>"),
    "named with code": each(f"<|call_begin|>function<|sep|>{NAME}{CODE}{ARGUMENTS}\n```<|call_end|>", between="\n"),
    "numbered": each(
        f"<|call_begin|>functions.{NAME}:{{{{ loop.index0 }}}}<|args|>{ARGUMENTS}<|call_end|>",
        "<|calls|>",
        "<|/calls|>",
    ),
    "name in a tag": each(f"<function={NAME}>{ARGUMENTS}</function>"),
    "tagged": each(
        f"<tool_call>\n<function={NAME}>\n{LOOP}<parameter={KEY}>\n{VALUE}\n</parameter>\n{ENDFOR}"
        "</function>\n</tool_call>",
        between="\n",
    ),
    "key and value": each(
        f"<tool_call>{NAME}\n{LOOP}<arg_key>{KEY}</arg_key>\n<arg_value>{VALUE}</arg_value>\n{ENDFOR}</tool_call>",
        between="\n",
    ),
    "invoke": each(
        f'<invoke name="{NAME}">\n{LOOP}<parameter name="{KEY}">{VALUE}</parameter>\n{ENDFOR}</invoke>\n',
        "<calls>\n",
        "</calls>",
    ),
    "pythonic": each(
        f"{NAME}({LOOP}{KEY}={JSON}{COMMA}{ENDFOR})",
        "[",
        "]",
        ", ",
    ),
    "pythonic lines": each(
        f"{NAME}({LOOP}{KEY}={JSON}{COMMA}{ENDFOR})\n",
        "<function_calls>\n",
        "</function_calls>",
    ),
}
TOOLS = (
    Tool("get_weather", {"type": "object", "properties": {"city": {"type": "string"}, "days": {"type": "integer"}}}),
    Tool("get_time"),
)


def renderer(source: str) -> Any:
    environment = jinja2.Environment(trim_blocks=True, lstrip_blocks=True, autoescape=False)  # noqa: S701
    environment.filters["tojson"] = lambda value: json.dumps(value, ensure_ascii=False)
    compiled = environment.from_string(source)

    def render(messages: Any, **options: Any) -> str:
        return compiled.render(messages=messages, **options)

    return render


def answer(render: Any, *calls: tuple[str, dict[str, Any]]) -> str:
    """What a model that follows the template writes."""
    written = [{"id": "abcdefghi", "function": {"name": name, "arguments": values}} for name, values in calls]
    messages = [{"role": "user", "content": "x"}]
    begin = render(messages, tools=None, add_generation_prompt=True)
    whole = render([*messages, {"role": "assistant", "tool_calls": written}], tools=None, add_generation_prompt=False)
    assert whole.startswith(begin)
    return whole[len(begin) :].removesuffix("<|end|>\n")


def read(parser: TemplateParser, text: str) -> AssistantMessage:
    message = AssistantMessage()
    reader = parser.start(ParserRequest(tools=TOOLS))
    for character in text:
        message.add(reader.feed(character))
    message.add(reader.finish())
    return message


@pytest.mark.parametrize("name", TEMPLATES)
def test_calls_as_the_template_writes_them_are_read(name: str) -> None:
    render = renderer(TEMPLATES[name])
    parser = TemplateParser(ParserSetup(render))
    for calls in ((PARIS,), (PARIS, TIME), (TIME,), (TIME, PARIS, PARIS)):
        message = read(parser, answer(render, *calls))
        found = [(call.name, json.loads(call.arguments)) for call in message.calls]
        assert found == list(calls)
        assert message.content == ""
    assert read(parser, "No call, just {text} [and more].").content == "No call, just {text} [and more]."


def test_markers_are_kept_in_the_text() -> None:
    parser = TemplateParser(ParserSetup(renderer(TEMPLATES["named"])))
    assert {"<|calls|>", "<|call_begin|>", "<|sep|>", "<|call_end|>", "<|/calls|>"} <= set(parser.tokens())


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (template(""), "writes no tool calls"),
        (each("{{ raise_it() }}"), "cannot use the chat template|undefined"),
        (each(f"I call {NAME} with things."), "cannot tell a call"),
    ],
)
def test_templates_that_show_no_call_are_refused(source: str, message: str) -> None:
    render = renderer(source)

    def refusing(messages: Any, **options: Any) -> str:
        try:
            return str(render(messages, **options))
        except jinja2.TemplateError as error:
            raise ValueError(str(error)) from error

    with pytest.raises(ValueError, match=message):
        TemplateParser(ParserSetup(refusing))
    with pytest.raises(ValueError, match="needs a chat template"):
        TemplateParser(ParserSetup())
