"""Every relative link of every Markdown file leads to a file, a folder or a heading that a clone has."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_FENCED = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)
_CODE = re.compile(r"`[^`\n]*`")
_LINK = re.compile(r"\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
_HEADING = re.compile(r"^#{1,6} +(.*?) *#*$", re.MULTILINE)


def tracked() -> set[str]:
    """The paths of all files and folders that git keeps or is about to keep."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("the tests are not run in a git repository")
    files = {name for name in done.stdout.splitlines() if (ROOT / name).exists()}
    return files | {str(folder) for name in files for folder in Path(name).parents}


def prose(path: Path) -> str:
    """The text of a page without its blocks of code."""
    return _FENCED.sub("", path.read_text(encoding="utf-8"))


def headings(path: Path) -> set[str]:
    """The anchors that code hosts give to the headings of a page: lower case, hyphens for spaces, no punctuation."""
    texts = (re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading) for heading in _HEADING.findall(prose(path)))
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in texts}


def dead_links(name: str, known: set[str]) -> Iterator[str]:
    for link in _LINK.findall(_CODE.sub("", prose(ROOT / name))):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = os.path.normpath(os.path.join(os.path.dirname(name), path)) if path else name
        if target not in known or (anchor and anchor not in headings(ROOT / target)):
            yield f"{name}: {link}"


def test_every_relative_link_leads_somewhere_in_a_clone() -> None:
    known = tracked()
    pages = sorted(name for name in known if name.endswith(".md"))
    assert "README.md" in pages
    assert [link for name in pages for link in dead_links(name, known)] == []


@pytest.mark.parametrize("link", ["gone.md", "README.md#no-such-heading", "docs/reference/plugin-interfaces.md"])
def test_a_dead_link_is_found(link: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = tracked()
    (tmp_path / "page.md").write_text(f"See [this]({link}) and [that](README.md).", encoding="utf-8")
    (tmp_path / "README.md").write_text("# A heading\n", encoding="utf-8")
    monkeypatch.setattr(f"{__name__}.ROOT", tmp_path)
    assert list(dead_links("page.md", known)) == [f"page.md: {link}"]


def test_a_decision_record_fits_on_a_page() -> None:
    folder = ROOT / "docs" / "decisions"
    lines = {page.name: page.read_text(encoding="utf-8").count("\n") for page in folder.glob("*.md")}
    assert {name: count for name, count in lines.items() if count > 60} == {}
