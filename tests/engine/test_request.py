"""The parts of a request are each changed in one file: what else changes them is found in the source."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import frame.core.engine

ENGINE = Path(frame.core.engine.__file__).parent
#: Part of a request → the file that may change its fields; the other parts change themselves, by methods.
WRITERS = {"cache": "cache/kv_cache.py", "transfer": None, "reported": None}
MUTATING = {"append", "extend", "insert", "pop", "remove", "clear", "sort", "reverse"}


def written(tree: ast.AST, part: str) -> list[int]:
    """Lines that assign to a field of `X.part`, or to an item of one, or call a method that changes a list there."""
    found = []
    for node in ast.walk(tree):
        targets: list[ast.expr] = []
        if isinstance(node, ast.Assign):
            targets = node.targets
        elif isinstance(node, (ast.AugAssign, ast.AnnAssign)):
            targets = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MUTATING:
            targets = [node.func.value]
        for target in targets:
            for inner in ast.walk(target):
                owner = inner.value if isinstance(inner, ast.Attribute) else None
                if isinstance(owner, ast.Attribute) and owner.attr == part and not isinstance(owner.value, ast.Call):
                    found.append(node.lineno)
    return found


@pytest.mark.parametrize("part", WRITERS)
def test_a_part_of_a_request_is_changed_in_one_file(part: str) -> None:
    writers = {
        path.relative_to(ENGINE).as_posix()
        for path in ENGINE.rglob("*.py")
        if written(ast.parse(path.read_text()), part)
    }
    assert writers == ({WRITERS[part]} if WRITERS[part] else set())


def test_the_search_for_writers_finds_assignments_and_mutations() -> None:
    source = (
        "a.cache.blocks[0] = []\na.cache.n += 1\na.cache.hashes.append(1)\na.cache = 1\na.cache.ask()\nb = a.cache.n\n"
    )
    assert written(ast.parse(source), "cache") == [1, 2, 3]
