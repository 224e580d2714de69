"""Hypothesis against what reads or writes foreign text: events, bodies, URLs, templates, model output, block hashes."""

from __future__ import annotations

import json
from array import array
from functools import cache
from typing import Any

import httpx
import msgspec
import pytest
from hypothesis import HealthCheck, example, given, settings, strategies as st
from pydantic import ValidationError

from frame.anthropic_errors import AnthropicErrors, event
from frame.core.config.tree import FrameConfig
from frame.core.engine.cache.hashing import BlockHasher
from frame.core.front.prompts import InvalidRequest
from frame.core.front.template import render_chat
from frame.core.interfaces.errors import ErrorShape
from frame.core.interfaces.kv import KVLayout
from frame.core.interfaces.schema import BoundedModel, Limits
from frame.core.plugin_host.registry import Registry
from frame.core.server.bodies import MAX_DEPTH, parse_json
from frame.core.server.errors import ERROR_SHAPE, error_body, error_event
from frame.interfaces import ChatOptions, ParserRequest, ParserSetup, RequestError, Tokenizer
from frame.plugins.batches.fetch import FetchError, FetchRules, parse_url
from frame.plugins.endpoints.openai_answers import Delta, DeltaChoice, Frames
from frame.testing import tokenizers as tiny
from tests.endpoints.test_bounds import BODIES
from tests.parsers.golden import CASES, TOOLS

QUICK = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
#: with lone surrogates, which model output and templates can spell
ANY_TEXT = st.text(alphabet=st.characters(exclude_categories=()), max_size=80) | st.sampled_from(
    ["\n\n", "\r", "data: x\n\n", "\u2028", "\x00", "\ud800", "event: error\ndata: {}\n\n"]
)
TEXT = ANY_TEXT.filter(lambda text: not any("\ud800" <= char <= "\udfff" for char in text))
JSON: st.SearchStrategy[Any] = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4),
    max_leaves=12,
)


def one_event(frame: bytes) -> tuple[str, Any]:
    """Reads a frame as the specification of server-sent events says; there must be exactly one event."""
    text = frame.decode()
    assert text.endswith("\n\n")
    lines = text[:-2].replace("\r\n", "\n").replace("\r", "\n").split("\n")
    fields = [line.split(": ", 1) for line in lines]
    assert [name for name, _ in fields] in (["data"], ["event", "data"])
    return (fields[0][1] if len(fields) == 2 else "message"), json.loads(fields[-1][1])


@QUICK
@given(TEXT, JSON)
def test_text_cannot_write_events_of_its_own(text: str, value: Any) -> None:
    def piece(index: int, content: str) -> DeltaChoice:
        return DeltaChoice(index, Delta(content=content))

    _, chunk = one_event(Frames(text, "chunk", 1, text, text, False, piece).choice(piece(0, text)))
    assert chunk["choices"][0]["delta"].get("content", "") == (text or "")
    assert chunk["id"] == chunk["model"] == text
    assert one_event(event("content", text=text)) == ("content", {"type": "content", "text": text})


@QUICK
@given(ANY_TEXT, st.integers(400, 599), st.none() | TEXT, st.sampled_from([ErrorShape(), AnthropicErrors()]))
def test_errors_are_one_event_and_one_body(text: str, status: int, param: str | None, shape: ErrorShape) -> None:
    scope = {ERROR_SHAPE: shape}
    error = RequestError(status, text, param=param)
    body = json.loads(error_body(scope, error))
    assert len(body["error"]["message"]) <= 2000
    assert "\n" not in body["error"]["message"]
    assert one_event(error_event(scope, error))[1]["error"]["message"] == body["error"]["message"]


@QUICK
@given(st.binary(max_size=200) | st.text('{}[]":,\\0e9-+.unltrfaseNI \n', max_size=120).map(str.encode))
@example(b'{"a": 1, "a": 2}')
@example(b"1" * 10_000)
@example(b'{"a": 1e400}')
@example(b'{"a": -0}')
@example(b'"\\ud800"')
@example(b"\xef\xbb\xbf{}")
@example(b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1))
def test_bodies_are_json_or_refused(body: bytes) -> None:
    try:
        value = parse_json(body)
    except RequestError:
        return
    msgspec.json.encode(value)
    assert json.loads(body, parse_constant=pytest.fail) is not None or body.strip() == b"null"


LIMITS = Limits(
    max_model_len=128, vocab_size=1000, max_logprobs=5, max_n=4, max_prompts=3, max_messages=6, max_stop=2,
    max_stop_length=10,
)  # fmt: skip
_ODD = st.sampled_from(
    [2**63, 2**64, -(2**63) - 1, 10**400, 1e308, -0.0, 5e-324, [], {}, "", "0", True, None, [None], [[]], "\x00", " "]
)


@pytest.mark.parametrize("body", BODIES, ids=lambda body: body.__name__)
@settings(QUICK, max_examples=30)
@given(data=st.data())
def test_wrong_types_are_refused_as_wrong(body: type[BoundedModel], data: st.DataObject) -> None:
    fields = data.draw(st.dictionaries(st.sampled_from(sorted(body.model_fields)), _ODD | JSON, max_size=6))
    base = {"messages": [{"role": "user", "content": "x"}], "prompt": "x", "input": "x"}
    try:
        body.model_validate({**base, **fields}, context={"limits": LIMITS})
    except ValidationError:
        return


@QUICK
@given(
    st.lists(st.sampled_from(["http", "https", ":", "//", "/", "@", "\\", "?", "#", "a.example", "127.0.0.1", "[::1]",
                              "[", "]", "%2e", "%", " ", "\t", "\n", "\x00", ".", "é", "0x7f", "user", ":80", ";"]),
             max_size=9).map("".join)
    | TEXT.map(lambda text: f"http://{text}")
)  # fmt: skip
@example("http://^")
def test_two_parsers_agree_about_every_accepted_url(url: str) -> None:
    try:
        parts = parse_url(url, FetchRules())
    except FetchError:
        return
    try:
        other = httpx.URL(url)
    except httpx.InvalidURL:
        return  # no client that reads it otherwise
    assert (parts.hostname or "").strip("[]") == other.host
    assert parts.scheme == other.scheme


@cache
def tokenizer(folder: Any) -> Tokenizer:
    return tiny.load(tiny.save(tiny.byte_level(), folder))


_PIECES = [
    "{{ messages }}", "{% for m in messages %}", "{% endfor %}", "{% if x %}", "{% endif %}", "{{ m.content }}", "{{",
    "}}", "{%", "%}", "{#", "{{ '\\ud800' }}", "{{ messages[9] }}", "{{ x.y.z }}", "{{ 1 / 0 }}",
    "{{ messages|tojson }}",
    "{{ messages.__class__ }}", "{{ cycler.__init__ }}", "{% set messages = 1 %}", "{{ raise_exception(messages) }}",
    "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.join(messages) }}", "{{ '%s' % messages }}",
    "{% break %}",
    "{{ namespace(__x=1) }}", "{% include 'x' %}", "{% import 'os' as o %}", "{{ lipsum(n=1) }}", "{{ self }}", "text",
]  # fmt: skip


@settings(QUICK, max_examples=150)
@given(parts=st.lists(st.sampled_from(_PIECES), min_size=1, max_size=5))
@example(parts=["{{ raise_exception('\\ud800') }}"])
def test_templates_render_or_are_refused(tmp_path_factory: pytest.TempPathFactory, parts: list[str]) -> None:
    options = ChatOptions(chat_template="{{ '' }}" + "".join(parts))
    found = tokenizer(tmp_path_factory.getbasetemp() / "fuzzed")
    try:
        prompt = render_chat(found, [{"role": "user", "content": "Hello"}], options)
    except InvalidRequest:
        return
    assert "object at 0x" not in (prompt.text or "").replace("lipsum", "")


@cache
def parser(name: str) -> Any:
    return Registry.load().make("tool-parser", name, ParserSetup(lambda *_, **__: ""), FrameConfig())


@pytest.mark.parametrize("name", [name for name, cases in CASES.items() if any("Paris" in case.text for case in cases)])
@settings(QUICK, max_examples=10)
@given(value=ANY_TEXT | JSON.map(json.dumps))
@example(value="\\ud800")
@example(value="\\x00\\N{DIGIT ONE}\\udfff")
def test_what_parsers_find_can_be_sent(name: str, value: str) -> None:
    """A model may write half a character as an escape; that must not break the answer it stands in."""
    sendable = value.encode(errors="replace").decode()
    for text in {case.text for case in CASES[name] if "Paris" in case.text}:
        for written in (text.replace("Paris", sendable), text.replace("get_weather", sendable)):
            reader = parser(name).start(ParserRequest(tools=TOOLS, prompt=""))
            for found in [*reader.feed(written, ()), *reader.finish()]:
                assert msgspec.json.encode([str(getattr(found, field, "")) for field in ("text", "name", "id")])


_FACTS = st.fixed_dictionaries(
    {
        "salt": st.none() | TEXT,
        "adapter": st.none() | TEXT,
        "media_keys": st.lists(TEXT, max_size=3),
        "deterministic": st.booleans(),
    }
)
_IDS = st.lists(st.integers(0, 2**31 - 1), min_size=4, max_size=12).filter(lambda ids: len(ids) % 4 == 0)


def chain(facts: dict[str, Any], ids: list[int], algorithm: str) -> list[bytes]:
    hasher = BlockHasher(algorithm, KVLayout(groups=(), pools=(2,), block_size=4, grain=4))
    hashes: list[bytes] = []
    hasher.extend(hashes, hasher.root(**facts), array("i", ids), len(ids) // 4)
    return hashes


@QUICK
@given(_FACTS, _FACTS, _IDS, _IDS, st.sampled_from(["sha256", "xxhash"]))
@example(
    {"salt": "ab", "adapter": "c", "media_keys": [], "deterministic": False},
    {"salt": "a", "adapter": "bc", "media_keys": [], "deterministic": False},
    [1] * 4,
    [1] * 4,
    "sha256",
)
@example(
    {"salt": None, "adapter": None, "media_keys": ["a", "b"], "deterministic": False},
    {"salt": None, "adapter": None, "media_keys": ["ab"], "deterministic": False},
    [1] * 4,
    [1] * 4,
    "sha256",
)
@example(
    {"salt": "", "adapter": None, "media_keys": [], "deterministic": False},
    {"salt": None, "adapter": "", "media_keys": [], "deterministic": False},
    [0] * 4,
    [0] * 4,
    "sha256",
)
def test_block_hashes_are_equal_exactly_for_equal_content(
    one: dict[str, Any], two: dict[str, Any], ids: list[int], others: list[int], algorithm: str
) -> None:  # fmt: skip
    first, second = chain(one, ids, algorithm), chain(two, others, algorithm)
    assert chain(one, ids, algorithm) == first
    for index, (left, right) in enumerate(zip(first, second, strict=False)):
        end = 4 * (index + 1)
        assert (left == right) == (one == two and ids[:end] == others[:end])
    assert len({*first}) == len(first)
