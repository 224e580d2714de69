"""The environment: hardly any variable is read, and none that a cluster may inject."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
PATTERN = re.compile(
    r"""environ(?:\.get\(|\.setdefault\(|\.pop\(|\[)\s*["'](\w+)["'](?!\]\s*=[^=])|getenv\(\s*["'](\w+)["']"""
)
INJECTED = re.compile(r"FRAME_(?:\w+_)?(?:PORT|SERVICE)(?:_|$)")


def test_at_most_five_variables_are_read():
    names = {
        name
        for folder in ("core", "plugins", "kernels", "src/frame")
        for file in (ROOT / folder).rglob("*.py")
        for found in PATTERN.findall(file.read_text(encoding="utf-8"))
        for name in found
        if name
    }
    assert len(names) <= 5, sorted(names)
    assert not [name for name in names if INJECTED.match(name)]
