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
M3 = "]<]minimax[>["


def dsml(name: str, *values: tuple[str, str, bool]) -> str:
    tag = "｜DSML｜"
    body = "".join(
        f'<{tag}parameter name="{key}" string="{str(is_text).lower()}">{value}</{tag}parameter>\n'
        for key, value, is_text in values
    )
    return f'<{tag}invoke name="{name}">\n{body}</{tag}invoke>\n'


def step3(name: str, **values: str) -> str:
    body = "".join(f'<steptml:parameter name="{key}">{value}</steptml:parameter>\n' for key, value in values.items())
    call = f'<steptml:invoke name="{name}">\n{body}</steptml:invoke>'
    return f"<｜tool_call_begin｜>function<｜tool_sep｜>{call}<｜tool_call_end｜>\n"


def xtml(name: str, *values: tuple[str, str, str], index: int = 1) -> str:
    body = "".join(
        f'<|open|>argument key="{key}" type="{kind}"<|sep|>{value}<|close|>argument<|sep|>'
        for key, kind, value in values
    )
    return f'<|open|>call tool="{name}" index="{index}"<|sep|>{body}<|close|>call<|sep|>'


def m3(name: str, body: str = "") -> str:
    """A call of MiniMax-M3, in whose body `«` stands for the prefix of tags."""
    return f'«<invoke name="{name}">{body}«</invoke>\n'.replace("«", M3)


def m3_calls(*calls: str) -> str:
    return f"{M3}<tool_call>\n{''.join(calls)}{M3}</tool_call>"


def cohere(*calls: tuple[str, str]) -> str:
    written = [
        f'{{"tool_call_id": "{number}", "tool_name": "{name}", "parameters": {arguments}}}'
        for number, (name, arguments) in enumerate(calls)
    ]
    return f"<|START_ACTION|>[\n    {','.join(written)}\n]<|END_ACTION|>"


#: The arguments of `NESTED` between marks `"`, for formats with their own marks of texts.
NESTED_MARKED = 'city:«Saint-"É"\\tienne {a} [b] 日本 😀«,hours:[1.5,-2],place:{at:[1,{b:[null,true]}]}'

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
    "deepseek_v4": [
        Case(
            "Ok.\n\n<｜DSML｜tool_calls>\n" + dsml("get_weather", ("city", "Paris", True), ("days", "3", False))
            + dsml("get_time") + "</｜DSML｜tool_calls>",
            [PARIS, TIME], "Ok.",
        ),
        Case(
            "<｜DSML｜tool_calls>\n" + dsml("search", ("query", "3", True)) + dsml("search", ("query", "<b>\n", True))
            + "</｜DSML｜tool_calls>",
            [("search", {"query": "3"}), ("search", {"query": "<b>\n"})],
        ),
        Case(
            "<｜DSML｜tool_calls>" + dsml(
                "get_weather", ("city", 'Saint-"É"\\tienne {a} [b] 日本 😀', True),
                ("place", '{"at": [1, {"b": [null, true]}]}', False), ("hours", "[1.5, -2]", False),
            ) + "</｜DSML｜tool_calls>Done.",
            [NESTED], "Done.",
        ),
    ],
    "glm47": [
        Case("Hm.<tool_call>get_time</tool_call>", [TIME], "Hm."),
        Case(
            glm("get_weather", city="Paris", days="3").replace("\n", "") + glm("get_time").replace("\n", ""), [PARIS, TIME],
        ),
        Case(glm("get_weather", city="Paris", days="3"), [PARIS]),
    ],
    "step3": [
        Case(
            f"I look.\n<｜tool_calls_begin｜>\n{step3('get_weather', city='Paris', days='3')}{step3('get_time')}"
            "<｜tool_calls_end｜>\nDone.",
            [PARIS, TIME], "I look.\nDone.",
        ),
        Case(step3("search", query="if a < b: </b>"), [("search", {"query": "if a < b: </b>"})]),
        Case(
            step3("get_weather", city='Saint-"É"\\tienne {a} [b] 日本 😀', place='{"at": [1, {"b": [null, true]}]}', hours="[1.5, -2]"),
            [NESTED],
        ),
        Case("<｜tool_calls_begin｜>no", [], "<｜tool_calls_begin｜>no"),
        Case(
            '<steptml:invoke name="get_weather">\n<steptml:parameter name="city">Paris\n'
            '<steptml:parameter name="units">null</steptml:parameter></steptml:invoke>',
            [("get_weather", {"city": "Paris\n", "units": None})],
        ),
    ],
    "mimo": [
        Case(
            "Hm.\n<tool_call>\n<function=get_weather>\n<parameter=city>Paris</parameter>\n<parameter=days>3</parameter>\n"
            "</function>\n</tool_call>\n<tool_call>\n<function=get_time>\n</function>\n</tool_call>",
            [PARIS, TIME], "Hm.",
        ),
        Case(
            "<tool_call>\n<function=search>\n<parameter=query>\na &amp; b\n</parameter>\n</function>\n</tool_call>",
            [("search", {"query": "\na &amp; b\n"})],
        ),
        Case(
            "<tool_call><function=get_weather><parameter=exact>True</parameter><parameter=days>3</parameter></function></tool_call>",
            [("get_weather", {"exact": True, "days": 3})],
        ),
    ],
    "kimi_k3": [
        Case(
            "<|open|>response<|sep|>On it.<|close|>response<|sep|><|open|>tools<|sep|>"
            + xtml("get_weather", ("city", "string", "Paris"), ("days", "number", "3")) + xtml("get_time", index=2)
            + "<|close|>tools<|sep|><|close|>message<|sep|>",
            [PARIS, TIME], "On it.",
        ),
        Case("Only text.<|close|>response<|sep|><|close|>message<|sep|>", [], "Only text."),
        Case(
            "<|open|>response<|sep|><|close|>response<|sep|><|open|>tools<|sep|>"
            + xtml("search", ("query", "string", ' <b> & "3" \n')) + "<|close|>tools<|sep|>",
            [("search", {"query": ' <b> & "3" \n'})],
        ),
        Case(
            "<|open|>tools<|sep|>" + xtml(
                "get_weather", ("city", "string", 'Saint-"É"\\tienne {a} [b] 日本 😀'),
                ("place", "object", '{"at": [1, {"b": [null, true]}]}'), ("hours", "array", "[1.5, -2]"),
            ) + "<|close|>tools<|sep|>",
            [NESTED],
        ),
        Case(
            "<|open|>tools<|sep|>" + xtml("other", ("a&amp;&quot;b", "boolean", "true"), ("c", "string", "4")),
            [("other", {'a&"b': True, "c": "4"})],
        ),
        Case(
            "<|open|>tools<|sep|><|open|>call tool=\"a b\" index=\"1\"<|sep|>x", [],
            "<|open|>tools<|sep|><|open|>call tool=\"a b\" index=\"1\"<|sep|>x",
        ),
    ],
    "minimax_m3": [
        Case(
            "So.\n" + m3_calls(m3("get_weather", "«<city>Paris«</city>«<days>3«</days>"), m3("get_time")) + "\nDone.",
            [PARIS, TIME], "So.\nDone.",
        ),
        Case(
            m3_calls(m3("get_weather", (
                '«<city>Saint-"É"\\tienne {a} [b] 日本 😀«</city>«<place>«<at>«<item>1«</item>«<item>«<b>«<item>null«</item>'
                "«<item>true«</item>«</b>«</item>«</at>«</place>«<hours>«<item>1.5«</item>«<item>-2«</item>«</hours>"
            ))),
            [NESTED],
        ),
        Case(m3_calls(m3("search", "«<query> <b>3</b>\n«</query>")), [("search", {"query": " <b>3</b>\n"})]),
        Case(
            m3_calls(m3("get_weather", '«<place>{"a": [1]}«</place>«<hours>«</hours>«<units>null«</units>')),
            [("get_weather", {"place": {"a": [1]}, "hours": [], "units": None})],
        ),
        Case(
            m3_calls(m3("other", "«<a>«<a>1«</a>«<b>x«</b>«<b>2«</b>«</a>«<c>x y«</c>")),
            [("other", {"a": {"a": 1, "b": ["x", 2]}, "c": "x y"})],
        ),
        Case(
            m3_calls(m3("get_weather", "«<place>text «<a>1«</a>«</place>")),
            [("get_weather", {"place": f"text {M3}<a>1{M3}</a>"})],
        ),
        Case(
            m3_calls(m3("get_weather", "«<city>Paris«<days>3«</days>"), m3("get_time")),
            [PARIS, TIME],
        ),
        Case(f"{M3}<tool_call>no", [], f"{M3}<tool_call>no"),
    ],
    "gemma4": [
        Case(
            'Look.<|tool_call>call:get_weather{city:<|"|>Paris<|"|>,days:3}<tool_call|><|tool_call>call:get_time{}<tool_call|>',
            [PARIS, TIME], "Look.",
        ),
        Case("<|tool_call>call:get_weather{" + NESTED_MARKED.replace("«", '<|"|>') + "}<tool_call|>Done.", [NESTED], "Done."),
        Case(
            '<|tool_call>call:get_weather{place:{<|"|>a<|"|>:{<|"|>b c<|"|>:<|"|>}{,:<|"|>}},hours:[1 , 2],exact:True}<tool_call|>',
            [("get_weather", {"place": {"a": {"b c": "}{,:"}}, "hours": [1, 2], "exact": True})],
        ),
        Case(
            '<|tool_call>call:search{query:<|"|>say <tool_call|> or }<|"|>}<tool_call|>',
            [("search", {"query": "say <tool_call|> or }"})],
        ),
        Case('<|tool_call>call:search{query:"a \\"}{\\" b"}<tool_call|>', [("search", {"query": 'a "}{" b'})]),
        Case("<|tool_call>call:get_weather{city: New York,days: 3 , units:null}<tool_call|>",
             [("get_weather", {"city": "New York", "days": 3, "units": None})]),
        Case('<|tool_call>call:get_weather{days:<|"|>3<|"|>,city:<|"|>4<|"|>}<tool_call|>',
             [("get_weather", {"days": 3, "city": "4"})]),
        Case('<|tool_call>call:other{a:1.5,b:[<|"|>x<|"|>,{c:false}],d:<|"|>3<|"|>}<tool_call|>',
             [("other", {"a": 1.5, "b": ["x", {"c": False}], "d": "3"})]),
        Case("<|tool_call>call:get_time<tool_call|>", [TIME]),
        Case("<|tool_call>not a call<tool_call|>", [], "<|tool_call>not a call<tool_call|>"),
    ],
    "functiongemma": [
        Case(
            "<start_function_call>call:get_weather{city:<escape>Paris<escape>,days:3}<end_function_call>"
            "<start_function_call>call:get_time{}<end_function_call>",
            [PARIS, TIME],
        ),
        Case(
            f"Ok. <start_function_call>call:get_weather{{{NESTED_MARKED.replace('«', '<escape>')}}}<end_function_call>",
            [NESTED], "Ok.",
        ),
        Case(
            "<start_function_call>call:get_weather{days:<escape>3<escape>,city:Paris}<end_function_call>",
            [("get_weather", {"days": 3, "city": "Paris"})],
        ),
    ],
    "lfm2": [
        Case("<|tool_call_start|>[get_weather(city='Paris', days=3), get_time()]<|tool_call_end|>Done.", [PARIS, TIME], "Done."),
        Case("Hm. <|tool_call_start|>[get_weather(city=\"Paris\", days=3)]<|tool_call_end|>", [PARIS], "Hm."),
        Case("[get_time()]", [TIME]),
        Case("<|tool_call_start|>no<|tool_call_end|>", [], "<|tool_call_start|>no<|tool_call_end|>"),
    ],
    "apertus": [
        Case(f'Hm.<|tools_prefix|>[{{"get_weather": {_PARIS}}}, {{"get_time": {{}}}}]<|tools_suffix|>', [PARIS, TIME], "Hm."),
        Case(f'<|tools_prefix|>[{{"get_weather": {NESTED_JSON}}}]<|tools_suffix|>Done.', [NESTED], "Done."),
        Case('<|tools_prefix|>[{"a b": {}}]<|tools_suffix|>', [], '<|tools_prefix|>[{"a b": {}}]<|tools_suffix|>'),
        Case('<|tools_prefix|>[{"get_time": null}]<|tools_suffix|>', [TIME]),
    ],
    "cohere_command3": [
        Case(
            "<|START_RESPONSE|>I look.<|END_RESPONSE|>" + cohere(("get_weather", _PARIS), ("get_time", "{}")),
            [PARIS, TIME], "I look.",
        ),
        Case(cohere(("get_weather", NESTED_JSON)), [NESTED]),
        Case("<|START_RESPONSE|>It < 3.<|END_RESPONSE|>", [], "It < 3."),
        Case("<|START_TEXT|>\nIt rains.\n\n<|END_TEXT|>", [], "It rains."),
    ],
    "gigachat3": [
        Case(f"Hm.<|message_sep|>\n\nfunction call<|role_sep|>\n{obj('get_weather')}<|message_sep|>", [PARIS], "Hm."),
        Case(f"function call<|role_sep|>\n{obj('get_weather', NESTED_JSON)}", [NESTED]),
        Case(f"Hm.\n<|function_call|>{obj('get_time', '{}')}<|message_sep|>", [TIME], "Hm."),
        Case("A function call is a call.<|message_sep|>", [], "A function call is a call."),
    ],
    "xlam": [
        Case(f"[{obj('get_weather')}, {obj('get_time', '{}')}]", [PARIS, TIME]),
        Case(f"I look. <tool_call>[{obj('get_weather', NESTED_JSON)}]</tool_call>", [NESTED], "I look."),
        Case('[{"name": "Alice"}]', [], '[{"name": "Alice"}]'),
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
    "deepseek_v4": [
        (
            f"<｜DSML｜tool_calls>\n{dsml('search').replace(chr(10), ' query: a ', 1)}{dsml('get_time')}</｜DSML｜tool_calls>",
            [("search", "query: a "), ("get_time", "{}")],
            "",
        ),
    ],
    "kimi_k3": [
        (
            '<|open|>tools<|sep|><|open|>call tool="search" index="1"<|sep|><|open|>argument key="query" type="string"<|sep|>a'
            "<|close|>call<|sep|>" + xtml("get_time") + "<|close|>tools<|sep|>Done.",
            [("search", '{"query": "a"}'), ("get_time", "{}")],
            "Done.",
        ),
        (
            '<|open|>tools<|sep|><|open|>call tool="search" index="1"<|sep|>query<|close|>call<|sep|><|close|>tools<|sep|>',
            [("search", "query")],
            "",
        ),
    ],
    "minimax_m3": [
        (
            m3_calls(m3("search", "«<query>a"), m3("get_time")) + "Done.",
            [("search", '{"query": "a"}'), ("get_time", "{}")],
            "Done.",
        ),
        (
            m3_calls(m3("get_weather", "«<place>«<a>1«</a>"), m3("get_time")),
            [("get_weather", '{"place": {"a": 1}}'), ("get_time", "{}")],
            "",
        ),
        (m3_calls(m3("search", "query: a")), [("search", "query: a")], ""),
    ],
    "step3": [
        (
            "<｜tool_calls_begin｜>\n" + step3("search", query="a").replace("</steptml:parameter>", "") + step3("get_time")
            + "<｜tool_calls_end｜>",
            [("search", '{"query": "a\\n"}'), ("get_time", "{}")],
            "",
        ),
    ],
    "gemma4": [
        (
            '<|tool_call>call:search{query:<|"|>a<tool_call|><|tool_call>call:get_time{}<tool_call|>Done.',
            [("search", '{"query": "a"}'), ("get_time", "{}")],
            "Done.",
        ),
        (
            "<|tool_call>call:get_weather{place:{a:[1<tool_call|><|tool_call>call:get_time{}<tool_call|>",
            [("get_weather", '{"place": "{a:[1"}'), ("get_time", "{}")],
            "",
        ),
        (
            "<|tool_call>call:search{query}<tool_call|><|tool_call>call:get_time{<tool_call|>",
            [("search", "query}"), ("get_time", "{}")],
            "",
        ),
    ],
    "functiongemma": [
        (
            "<start_function_call>call:search{query:<escape>a<end_function_call>",
            [("search", '{"query": "a"}')],
            "",
        ),
    ],
    "apertus": [
        (
            '<|tools_prefix|>[{"search": {"query": "a"<|tools_suffix|><|tools_prefix|>[{"get_time": {}}]<|tools_suffix|>Done.',
            [("search", '{"query": "a"'), ("get_time", "{}")],
            "Done.",
        ),
    ],
    "cohere_command3": [
        (
            cohere(("search", '{"query": ["a"')).replace("}\n]", "") + cohere(("get_time", "{}")),
            [("search", '{"query": ["a"'), ("get_time", "{}")],
            "",
        ),
    ],
    "gigachat3": [
        (
            'function call<|role_sep|>\n{"name": "search", "arguments": {"query": "a"<|message_sep|>',
            [("search", '{"query": "a"')],
            "",
        ),
    ],
    "lfm2": [
        (
            "<|tool_call_start|>[search('a'), get_time()]<|tool_call_end|>Done.",
            [("search", "'a'"), ("get_time", "{}")],
            "Done.",
        ),
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
    "granite": [
        ("", "Here is my thought process: Hm.\n\nHere is my response: Yes.", "Hm.", "Yes."),
        ("", "Here's my thought process: Hm.\n\nHere's my response: Yes.", "Hm.", "Yes."),
        ("", "<think>Hm.</think><response>Yes.</response>", "Hm.", "Yes."),
        ("", "<think>Hm.</think>\n<response>\nYes, <response>.\n</response>\n", "Hm.", "Yes, <response>."),
        ("", "<think>Hm.</think>It has a <response>tag</response>", "Hm.", "It has a <response>tag</response>"),
        ("<think>\n", "Hm.</think><response>a</response> b</response>", "Hm.", "a</response> b"),
    ],
    "hunyuan_a13b": [
        ("", "<think>\nHm.\n</think>\n<answer>\nYes.\n</answer>", "Hm.", "Yes."),
        ("", "<answer>\nYes.\n</answer>\n", "", "Yes."),
        ("", "<think>\n\n</think>\n<answer>\nYes </answ", "", "Yes </answ"),
        ("", "Yes.", "", "Yes."),
    ],
    "gemma4": [
        ("", "<|channel>thought\nHm.\n<channel|>Yes.", "Hm.", "Yes."),
        ("", "<|channel>thoughtful.<channel|>Yes.", "thoughtful.", "Yes."),
        ("<|channel>thought\n<channel|>", "Yes.", "", "Yes."),
        ("<|turn>model\n<|channel>thought\n", "Hm.<channel|>Yes.", "Hm.", "Yes."),
        ("", "<|channel>thought\nHm.<|tool_call>call:x", "Hm.", "<|tool_call>call:x"),
        ("", "Yes.", "", "Yes."),
    ],
    "apertus": [
        ("", "<|inner_prefix|>Hm.<|inner_suffix|>Yes.", "Hm.", "Yes."),
        ("", "<|inner_prefix|>Hm.<|tools_prefix|>[", "Hm.", "<|tools_prefix|>["),
        ("", "Yes.", "", "Yes."),
    ],
    "cohere_command3": [
        (
            "",
            "<|START_THINKING|>Hm.<|END_THINKING|><|START_RESPONSE|>Yes.<|END_RESPONSE|>",
            "Hm.",
            "Yes.",
        ),
        ("x<|START_THINKING|>", "Hm.<|END_THINKING|>\n<|START_TEXT|>Yes.<|END_TEXT|>", "Hm.", "Yes."),
        ("x<|START_THINKING|><|END_THINKING|>", "<|START_RESPONSE|>Yes.<|END_RESPONSE|>", "", "Yes."),
        ("", "<|START_THINKING|>Hm.<|START_ACTION|>[", "Hm.", "<|START_ACTION|>["),
    ],
    "kimi_k3": [
        (
            "<|open|>think<|sep|>",
            "Hm.<|close|>think<|sep|><|open|>response<|sep|>Yes.<|close|>response<|sep|><|close|>message<|sep|>",
            "Hm.",
            "Yes.",
        ),
        ("", "<|open|>think<|sep|>Hm.<|close|>think<|sep|><|open|>tools<|sep|>", "Hm.", "<|open|>tools<|sep|>"),
        ("<|open|>response<|sep|>", "Yes.<|close|>response<|sep|>", "", "Yes."),
    ],
    "minimax_m3": [
        ("", "<mm:think>Hm.</mm:think>\nYes.", "Hm.", "Yes."),
        ("x<mm:think>", "Hm.</mm:think>Yes.", "Hm.", "Yes."),
        ("", "</mm:think>Yes </mm:think>", "", "Yes </mm:think>"),
        ("", f"<mm:think>Hm.{M3}<tool_call>", "Hm.", f"{M3}<tool_call>"),
    ],
    "seed_oss": [("", "<seed:think>Hm.</seed:think>Yes.", "Hm.", "Yes.")],
    "openai_gptoss": [
        ("", message("analysis", "Hm.") + START + message("final", "Yes.", "<|return|>"), "Hm.", "Yes."),
        ("", message("final", "Yes."), "", "Yes."),
    ],
}
