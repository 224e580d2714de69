"""The fenced blocks of README and docs.

A comment on the line before a block marks it: `file: NAME` is a whole file for a test to lay out, `from: PATH` a part
of a file of ours. Every other Python block runs.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
SERVER = "http://127.0.0.1:8000"
_BLOCK = re.compile(r"^(?:<!-- ([^\n]*) -->\n)?```(\w+)[^\n]*\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """`mark` is the text of the comment before it, empty without one; `line` is where its text begins."""

    page: Path
    line: int
    language: str
    text: str
    mark: str

    @property
    def place(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def runs(self) -> bool:
        """Whether it is to be run as it stands."""
        return not self.mark.startswith(("from: ", "file: "))

    @property
    def needs_server(self) -> bool:
        return SERVER in self.text


def blocks(page: Path, *languages: str) -> list[Block]:
    """The blocks of a page in these languages."""
    text = page.read_text(encoding="utf-8")
    return [
        Block(page, text.count("\n", 0, found.start(3)) + 1, found[2], found[3], found[1] or "")
        for found in _BLOCK.finditer(text)
        if found[2] in languages
    ]


def commands(page: Path) -> list[str]:
    """The command lines of a page, without comments and without the folder of the virtual environment."""
    lines = [line for block in blocks(page, "sh") if block.runs for line in block.text.splitlines()]
    return [line.split("  #")[0].strip().removeprefix(".venv/bin/") for line in lines if line.strip()]


def marked_file(page: Path, name: str) -> str:
    """The block that is marked `file: NAME`."""
    (text,) = [block.text for block in blocks(page, "python", "sh", "toml", "yaml") if block.mark == f"file: {name}"]
    return text
