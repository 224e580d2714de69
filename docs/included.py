"""Fills the code of pages from files that tests run, so that pages are readable in the repository too.

A line `<!-- code: PATH -->` or `<!-- code: PATH:SECTION -->` stands above a fenced block, whose content is the file's,
or that between `--8<-- [start:SECTION]` and `[end:SECTION]` in it.
"""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"(<!-- code: (?P<path>[^\s:]+)(?::(?P<section>\w+))? -->\n```\w*\n)(?:.*?\n)??(```\n)", re.DOTALL)
PAGES = ("plugins/tutorial.md", "plugins/contract.md", "plugins/hooks.md", "plugins/quantization.md")


def pages() -> dict[str, str]:
    """Path of a page in docs → its text with the code of today."""
    folder = Path(__file__).parent
    return {name: _BLOCK.sub(_filled, (folder / name).read_text(encoding="utf-8")) for name in PAGES}


def _filled(block: re.Match[str]) -> str:
    text = (ROOT / block["path"]).read_text(encoding="utf-8")
    if block["section"]:
        start, end = (f"# --8<-- [{mark}:{block['section']}]\n" for mark in ("start", "end"))
        text = text.partition(start)[2].partition(end)[0]
        if not text:
            raise ValueError(f"{block['path']} has no section {block['section']!r}")
    return f"{block[1]}{text.strip()}\n{block[4]}"
