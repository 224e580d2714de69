"""The grammar of literals: equal to Python's own where both read, refusing where JSON has no such value."""

from __future__ import annotations

import ast
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from frame.plugins import parsers
from frame.plugins.parsers.literals import MAX_DEPTH, LiteralError, read_json, read_literal, to_json

SCALARS = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False),
    st.text(st.characters(exclude_categories=["Cs"])),
)  # fmt: skip
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=5), inner), max_leaves=20
)


@settings(deadline=None, max_examples=100)
@given(VALUES)
def test_literals_that_python_writes_are_read(value: Any) -> None:
    assert read_literal(repr(value)) == value
    assert read_literal(json.dumps(value)) == value
    assert read_json(to_json(value)) == value


@settings(deadline=None, max_examples=200)
@given(st.text("'\"\\nux0123 ab,[](){}:-+.eTrueNone", max_size=20))
def test_any_text_is_read_as_python_does_or_refused(text: str) -> None:
    try:
        found = read_literal(text)
    except LiteralError:
        return
    to_json(found).encode()
    try:
        want = ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return  # ours also takes true, false, null and 007
    if not isinstance(want, (set, complex, bytes)) and "\\" not in text and "u'" not in text:
        assert json.loads(json.dumps(found)) == json.loads(json.dumps(want, default=list))


@pytest.mark.parametrize(
    "text",
    [
        "", "nan", "inf", "1e999", "f(1)", "__import__('os')", "a", "1 2", "[1", "{1: 2", "'a", "{[1]: 2}", "lambda: 1",
        "1" * 5000, "[" * (MAX_DEPTH + 2) + "]" * (MAX_DEPTH + 2), "'\\x1'", "'\\U00110000'", "b'a'", "1 if 2 else 3",
    ],
)  # fmt: skip
def test_text_that_is_no_literal_is_refused(text: str) -> None:
    with pytest.raises(LiteralError):
        read_literal(text)


def test_quoted_texts() -> None:
    assert read_literal(r"'a\'b\n\u00e9\x41\q'") == "a'b\né" + "A" + "\\q"
    assert read_literal("'''a\n'b'\"c\"'''") == "a\n'b'\"c\""
    assert read_literal("('a' \"b\"\n'c')") == "abc"
    assert to_json(read_literal("'\\ud83d\\ude00 \\ud83d'")) == '"😀 \ufffd"'
    assert read_literal("(1,)") == [1]
    assert read_literal("(1)") == 1
    assert read_literal("{True: None, 'a': (1, 2),}") == {"true": None, "a": [1, 2]}
    assert read_literal("-1_000.5e3") == -1_000_500.0


@pytest.mark.parametrize("number", ["NaN", "Infinity", "-Infinity", "1e999", "[1e999]"])
def test_numbers_that_json_lacks_are_refused(number: str) -> None:
    with pytest.raises(LiteralError):
        read_json(number)


def test_the_parsers_evaluate_nothing() -> None:
    banned = {"eval", "exec", "compile", "literal_eval", "__import__"}
    for path in sorted(Path(parsers.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            name = getattr(node, "attr", getattr(node, "id", None))
            found = name in banned and not (name == "compile" and isinstance(node, ast.Attribute))
            assert not found, f"{path.name} uses {name}"
