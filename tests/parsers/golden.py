"""Outputs in each format, by parser: the text, and what must come of it. Calls are (name, arguments)."""

from __future__ import annotations

from typing import Any, NamedTuple

from frame.interfaces import Tool

TOOLS = (
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "units": {"type": ["string", "null"]},
                "exact": {"type": "boolean"},
                "place": {"type": "object"},
                "hours": {"type": "array", "items": {"type": "number"}},
                "limit": {"anyOf": [{"type": "number"}, {"type": "null"}]},
            },
        },
    ),
    Tool("get_time"),
    Tool("search", {"type": "object", "properties": {"query": {"type": "string"}}}),
    Tool(
        "loose",
        {
            "properties": {
                "ratio": {"type": "float"},
                "count": {"type": "int"},
                "really": {"type": "bool"},
                "table": {"type": "dict"},
                "rows": {"type": "list"},
                "label": {"type": "str"},
            }
        },
    ),
)


class Case(NamedTuple):
    """One output. `ids` are those that the format itself has."""

    text: str
    calls: list[tuple[str, Any]]
    content: str = ""
    reasoning: str = ""
    ids: list[str] | None = None


PARIS = ("get_weather", {"city": "Paris", "days": 3})
TIME = ("get_time", {})
NESTED = (
    "get_weather",
    {"city": 'Saint-"É"\\tienne {a} [b] 日本 😀', "place": {"at": [1, {"b": [None, True]}]}, "hours": [1.5, -2]},
)
NESTED_JSON = (
    '{"city": "Saint-\\"É\\"\\\\tienne {a} [b] 日本 😀", "place": {"at": [1, {"b": [null, true]}]}, "hours": [1.5, -2]}'
)
_PARIS = '{"city": "Paris", "days": 3}'


def obj(name: str, arguments: str = _PARIS, key: str = "arguments") -> str:
    return f'{{"name": "{name}", "{key}": {arguments}}}'


def hermes(body: str) -> str:
    return f"<tool_call>\n{body}\n</tool_call>"


def fn(name: str, **values: str) -> str:
    body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values.items())
    return f"<tool_call>\n<function={name}>\n{body}</function>\n</tool_call>"


def glm(name: str, **values: str) -> str:
    body = "".join(f"<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n" for key, value in values.items())
    return f"<tool_call>{name}\n{body}</tool_call>"


def ds(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def ds31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def section(*calls: str) -> str:
    return f"<｜tool▁calls▁begin｜>{''.join(calls)}<｜tool▁calls▁end｜>"


def kimi(name: str, number: int, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:{number}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def message(channel: str, body: str, end: str = "<|end|>", to: str = "") -> str:
    head = f"{channel} to={to} <|constrain|>json" if to else channel
    return f"<|channel|>{head}<|message|>{body}{end}"


START = "<|start|>assistant"

CASES: dict[str, list[Case]] = {
    "hermes": [
        Case(f"Let me look.\n{hermes(obj('get_weather'))}\n{hermes(obj('get_time', '{}'))}", [PARIS, TIME], "Let me look."),
        Case(f"{hermes(obj('get_weather', NESTED_JSON))}\n\nDone.", [NESTED], "Done."),
        Case(f"One\n{hermes(obj('get_time', '{}'))}\ntwo", [TIME], "One\ntwo"),
        Case(hermes('{"arguments": {"city": "Paris", "days": 3}, "name": "get_weather"}'), [PARIS]),
        Case(hermes('{"name": "get_weather", "arguments": "{\\"city\\": \\"Paris\\", \\"days\\": 3}"}'), [PARIS]),
        Case(hermes('{"name": "get_time"}'), [TIME]),
        Case(hermes('{"name": "get_time", "arguments": null, "id": "c1", "type": "function"}'), [TIME]),
        Case(hermes('{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}'), [PARIS]),
        Case('<tool_call>{"name": "get_weather", "arguments": {"city": "Paris", "days": 3}}', [PARIS]),
        Case(hermes("not a call"), [], hermes("not a call")),
        Case(hermes('{"title": 1}'), [], hermes('{"title": 1}')),
        Case(hermes('{"name": "a b", "arguments": {}}'), [], hermes('{"name": "a b", "arguments": {}}')),
        Case("5 < 6 <tool", [], "5 < 6 <tool"),
        Case(
            hermes('{"name": "search", "arguments": {"query": "say </tool_call> or <tool_call>"}}'),
            [("search", {"query": "say </tool_call> or <tool_call>"})],
        ),
    ],
    "llama3_json": [
        Case(obj("get_weather", key="parameters"), [PARIS]),
        Case(f"{obj('get_weather', key='parameters')}; {obj('get_time', '{}', 'parameters')}", [PARIS, TIME]),
        Case(f"<|python_tag|>{obj('get_weather', NESTED_JSON)}", [NESTED]),
        Case('{"name": "Alice", "age": 3}', [], '{"name": "Alice", "age": 3}'),
        Case('{"answer": {"name": "get_weather"}}', [], '{"answer": {"name": "get_weather"}}'),
        Case("[1, 2] are numbers", [], "[1, 2] are numbers"),
    ],
    "json": [
        Case(f"[{obj('get_weather', key='parameters')}, {obj('get_time', '{}', 'parameters')}]", [PARIS, TIME]),
        Case("[]", []),
    ],
    "qwen3_coder": [
        Case(f"I look.\n\n{fn('get_weather', city='Paris', days='3')}\n{fn('get_time')}", [PARIS, TIME], "I look."),
        Case(
            fn("get_weather", city='Saint-"É"\\tienne {a} [b] 日本 😀', place='{"at": [1, {"b": [null, true]}]}', hours="[1.5, -2]"),
            [NESTED],
        ),
        Case(fn("search", query="a\n<b>\n  c\n"), [("search", {"query": "a\n<b>\n  c\n"})]),
        Case(fn("search", query="42"), [("search", {"query": "42"})]),
        Case(
            fn("get_weather", units="null", exact="True", limit="none at all", place="{'a': True}"),
            [("get_weather", {"units": None, "exact": True, "limit": "none at all", "place": {"a": True}})],
        ),
        Case("<function=get_weather>\n<parameter=city>\nParis</parameter><parameter=days>3</parameter></function>", [PARIS]),
        Case(fn("other", a="1", b="x", c="[1]"), [("other", {"a": 1, "b": "x", "c": [1]})]),
        Case("<tool_call>\nno function\n</tool_call>", [], "<tool_call>\nno function\n</tool_call>"),
        Case(
            "<tool_call>\n<function=get_weather>\n<parameter=city>\nParis\n<parameter=days>\n3\n</function>\n</tool_call>\n"
            + fn("get_time") + "\nDone.",
            [PARIS, TIME], "Done.",
        ),
        Case(
            "<tool_call>\n<function=search>\n<parameter=query>\na\n</tool_call>\n" + fn("get_time"),
            [("search", {"query": "a"}), TIME],
        ),
        Case(
            fn("search", query="</function> ends it,\n<parameter= begins one"),
            [("search", {"query": "</function> ends it,\n<parameter= begins one"})],
        ),
        Case(
            fn("loose", ratio="3", count="4", really="True", table="{'a': 1}", rows="[1]", label="5"),
            [("loose", {"ratio": 3, "count": 4, "really": True, "table": {"a": 1}, "rows": [1], "label": "5"})],
        ),
    ],
    "glm45": [
        Case(f"Right.\n{glm('get_weather', city='Paris', days='3')}\n{glm('get_time')}", [PARIS, TIME], "Right."),
        Case(
            glm("get_weather", city='Saint-"É"\\tienne {a} [b] 日本 😀', place='{"at": [1, {"b": [null, true]}]}', hours="[1.5, -2]"),
            [NESTED],
        ),
        Case(
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris</arg_value><arg_key>days</arg_key>"
            "<arg_value>3</arg_value></tool_call>",
            [PARIS],
        ),
        Case(
            "<tool_call>get_weather<arg_key>city</arg_key><arg_value>Paris<arg_key>days</arg_key><arg_value>3</tool_call>"
            "Done.",
            [PARIS], "Done.",
        ),
    ],
    "pythonic": [
        Case("[get_weather(city='Paris', days=3), get_time()]", [PARIS, TIME]),
        Case(
            "[get_weather(city=\"Saint-\\\"É\\\"\\\\tienne {a} [b] 日本 😀\", place={'at': [1, {'b': [None, True]}]},"
            " hours=(1.5, -2))]",
            [NESTED],
        ),
        Case("[search(query='''a 'quoted' \"text\"''')]", [("search", {"query": "a 'quoted' \"text\""})]),
        Case("[search(query='a' 'b')] and more", [("search", {"query": "ab"})], "and more"),
        Case("[link](http://x)", [], "[link](http://x)"),
        Case("[os.system('x')]", [], "[os.system('x')]"),
        Case("get_weather(city='Paris')", [], "get_weather(city='Paris')"),
    ],
    "llama4_pythonic": [
        Case("Well <|python_start|>[get_weather(city='Paris', days=3), get_time()]<|python_end|>", [PARIS, TIME], "Well"),
        Case("[get_weather(city='Paris', days=3)]", [PARIS]),
    ],
    "olmo3": [
        Case("<function_calls>\nget_weather(city='Paris', days=3)\nget_time()\n</function_calls>", [PARIS, TIME]),
    ],
    "mistral": [
        Case(f"Hm.[TOOL_CALLS] [{obj('get_weather')}, {obj('get_time', '{}')}]", [PARIS, TIME], "Hm."),
        Case(f"[TOOL_CALLS]get_weather{_PARIS}[TOOL_CALLS]get_time{{}}", [PARIS, TIME]),
        Case(f"[TOOL_CALLS]get_weather[ARGS]{_PARIS}[TOOL_CALLS]get_time[ARGS]{{}}", [PARIS, TIME]),
        Case(f"[TOOL_CALLS]get_weather[CALL_ID]abc123XYZ[ARGS]{_PARIS}", [PARIS], ids=["abc123XYZ"]),
        Case(f"[TOOL_CALLS]get_weather{NESTED_JSON}", [NESTED]),
        Case('[TOOL_CALLS] [{"id": "VvvODy9mT", "name": "get_time", "arguments": {}}]', [TIME], ids=["VvvODy9mT"]),
        Case("[TOOL_CALLS]", [], "[TOOL_CALLS]"),
    ],
    "deepseek_v3": [
        Case(f"Sure.\n\n{section(ds('get_weather', _PARIS) + chr(10), ds('get_time', '{}'))}", [PARIS, TIME], "Sure."),
        Case(section(ds("get_weather", NESTED_JSON)), [NESTED]),
    ],
    "deepseek_v31": [
        Case(f"Sure.{section(ds31('get_weather', _PARIS), ds31('get_time', '{}'))}", [PARIS, TIME], "Sure."),
        Case(section(ds31("get_weather", NESTED_JSON)), [NESTED]),
        Case("<｜tool▁calls▁begin｜>no", [], "<｜tool▁calls▁begin｜>no"),
    ],
    "deepseek_v32": [
        Case(
            'Ok.\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
            '<｜DSML｜parameter name="city" string="true">Paris</｜DSML｜parameter>\n'
            '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
            '<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="query" string="true">[1]</｜DSML｜parameter>\n'
            "</｜DSML｜invoke>\n</｜DSML｜function_calls>",
            [PARIS, ("search", {"query": "[1]"})],
            "Ok.",
        ),
    ],
    "kimi_k2": [
        Case(
            "Look:<|tool_calls_section_begin|>"
            + kimi("get_weather", 0, _PARIS)
            + kimi("get_time", 1, "{}")
            + "<|tool_calls_section_end|>",
            [PARIS, TIME],
            "Look:",
            ids=["functions.get_weather:0", "functions.get_time:1"],
        ),
        Case(f"<|tool_calls_section_begin|>{kimi('get_weather', 3, NESTED_JSON)}", [NESTED]),
    ],
    "openai": [
        Case(
            message("analysis", "Think.") + START + message("commentary", _PARIS, "<|call|>", "functions.get_weather"),
            [PARIS],
            reasoning="Think.",
        ),
        Case(
            message("analysis", "A") + START + message("commentary", "Let me see.") + START
            + message("commentary", _PARIS, "<|end|>", "functions.get_weather") + START
            + message("commentary", "{}", "", "functions.get_time"),
            [PARIS, TIME], "Let me see.", "A",
        ),
        Case(message("analysis", "A") + START + message("analysis", "B") + START + message("final", "C", "<|return|>"),
             [], "C", "A\nB"),
        Case(f"{START} to=functions.get_weather<|channel|>commentary json<|message|>{NESTED_JSON}<|call|>", [NESTED]),
        Case(message("commentary", " ", "<|call|>", "functions.get_time"), [TIME]),
        Case("just text", [], "just text"),
    ],
    "minimax_m2": [
        Case(
            'So.\n<minimax:tool_call>\n<invoke name="get_weather">\n<parameter name="city">Paris</parameter>\n'
            '<parameter name="days">3</parameter>\n</invoke>\n<invoke name="get_time">\n</invoke>\n</minimax:tool_call>',
            [PARIS, TIME],
            "So.",
        ),
    ],
    "granite": [Case(f"<|tool_call|>[{obj('get_weather')}, {obj('get_time', '{}')}]", [PARIS, TIME])],
    "jamba": [Case(f"<tool_calls>[\n{obj('get_weather')},\n{obj('get_time', '{}')}\n]</tool_calls>", [PARIS, TIME])],
    "seed_oss": [Case(fn("get_weather", city="Paris", days="3").replace("tool_call>", "seed:tool_call>"), [PARIS])],
    "phi4_mini_json": [Case(f"functools[{obj('get_weather')}]", [PARIS])],
    "internlm": [
        Case(f"Ok.\n<|action_start|><|plugin|>\n{obj('get_weather', key='parameters')}\n<|action_end|>", [PARIS], "Ok."),
    ],
    "granite-20b-fc": [
        Case(f"<function_call> {obj('get_weather')} <function_call> {obj('get_time', '{}')}", [PARIS, TIME]),
    ],
    "functionary_v3": [
        Case(f"<function=get_weather>{_PARIS}</function><function=get_time>{{}}</function>", [PARIS, TIME]),
    ],
}  # fmt: skip


#: Outputs of calls whose arguments are no JSON: the text, the calls as (name, arguments as written), and the content.
BROKEN: dict[str, list[tuple[str, list[tuple[str, str]], str]]] = {
    "hermes": [
        (
            hermes('{"name": "search", "arguments": {"query": "a"') + "\n" + hermes(obj("get_time", "{}")) + "\nDone.",
            [("search", '{"query": "a"\n'), ("get_time", "{}")],
            "Done.",
        ),
        (
            hermes('{"name": "search", "arguments": {"query": "a}}') + "\n" + hermes(obj("get_time", "{}")),
            [("search", '{"query": "a}}\n'), ("get_time", "{}")],
            "",
        ),
        (
            hermes('{"name": "search", "arguments": {"query": [1'),
            [("search", '{"query": [1\n')],
            "",
        ),
    ],
    "kimi_k2": [
        (
            "<|tool_calls_section_begin|>" + kimi("search", 0, '{"query": {"a": 1}') + kimi("get_time", 1, "{}")
            + "<|tool_calls_section_end|>Done.",
            [("search", '{"query": {"a": 1}'), ("get_time", "{}")],
            "Done.",
        ),
        (
            "<|tool_calls_section_begin|>" + kimi("search", 0, '{"query": "a') + kimi("get_time", 1, "{}"),
            [("search", '{"query": "a'), ("get_time", "{}")],
            "",
        ),
    ],
    "deepseek_v31": [
        (
            section(ds31("search", '{"query": "a"'), ds31("get_time", "{}")),
            [("search", '{"query": "a"'), ("get_time", "{}")],
            "",
        ),
    ],
    "deepseek_v3": [
        (
            section(ds("search", '{"query": ["a"'), ds("get_time", "{}")),
            [("search", '{"query": ["a"'), ("get_time", "{}")],
            "",
        ),
    ],
    "openai": [
        (message("commentary", "Paris", "<|call|>", "functions.search").replace(" <|constrain|>json", ""),
         [("search", "Paris")], ""),
        (message("commentary", '{"query": "a"', "<|end|>", "functions.search") + START + message("final", "Done."),
         [("search", '{"query": "a"')], "Done."),
    ],
    "qwen3_coder": [
        (f"<tool_call>\n<function=search>\nquery: a\n</tool_call>\n{fn('get_time')}",
         [("search", "query: a\n"), ("get_time", "{}")], ""),
    ],
}  # fmt: skip

#: Reasoning parser → (prompt's end, output, reasoning, content).
REASONING: dict[str, list[tuple[str, str, str, str]]] = {
    "qwen3": [
        ("", "<think>\nHm, 日本.\n\nSo.\n</think>\n\nYes.\n", "Hm, 日本.\n\nSo.", "Yes.\n"),
        ("<|im_start|>assistant\n<think>\n", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("<|im_start|>assistant\n<think>\n\n</think>\n\n", "Yes.", "", "Yes."),
        ("what does <think> mean?<|im_start|>assistant\n", "It is a tag.", "", "It is a tag."),
        ("", "\n<think>\n\n</think>\n\nYes.", "", "Yes."),
        ("", "<think>never ends", "never ends", ""),
        ("", "Yes, <think> is a tag.", "", "Yes, <think> is a tag."),
        ("", "<think>a</think>b<think>c</think>", "a", "b<think>c</think>"),
        ("", f"<think>Look.\n{hermes(obj('get_time', '{}'))}", "Look.", hermes(obj("get_time", "{}"))),
        ("", f"<think>Look.\n{fn('get_time')}\nx", "Look.", fn("get_time") + "\nx"),
        ("", f"<think>Look.\n{glm('get_time')}", "Look.", glm("get_time")),
        ("", "<think>Write <tool_call> tags.</think>Yes.", "Write <tool_call> tags.", "Yes."),
        ("", "<think>Look.<|tool_calls_section_begin|>x", "Look.", "<|tool_calls_section_begin|>x"),
    ],
    "deepseek_r1": [
        ("", "Hm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("", "<think>\nHm.\n</think>\n\nYes.", "Hm.", "Yes."),
        ("<｜Assistant｜></think>", "Yes.", "", "Yes."),
        ("", "a < b </thin", "a < b </thin", ""),
    ],
    "mistral": [("", "[THINK]Hm.[/THINK]Yes.", "Hm.", "Yes."), ("", "Yes.", "", "Yes.")],
    "granite": [("", "Here is my thought process: Hm.\n\nHere is my response: Yes.", "Hm.", "Yes.")],
    "seed_oss": [("", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes.")],
    "openai_gptoss": [
        ("", message("analysis", "Hm.") + START + message("final", "Yes.", "<|return|>"), "Hm.", "Yes."),
        ("", message("final", "Yes."), "", "Yes."),
    ],
}
