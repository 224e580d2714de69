"""Core stays small enough to be read: whoever adds to it takes something out, or says in a decision record why not."""

from __future__ import annotations

from pathlib import Path

CORE = Path(__file__).parents[1] / "core"
#: Physical lines of all of core's Python.
MOST_LINES = 36_000


def test_core_stays_small() -> None:
    lines = {path: path.read_text(encoding="utf-8").count("\n") for path in CORE.rglob("*.py")}
    total = sum(lines.values())
    largest = sorted(lines, key=lambda path: -lines[path])[:5]
    names = ", ".join(f"{path.relative_to(CORE)} {lines[path]}" for path in largest)
    assert total <= MOST_LINES, f"core has {total} lines, at most {MOST_LINES} are allowed; the largest files: {names}"
