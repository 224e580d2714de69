"""Writes docs/reference from the code: settings, commands, sampling parameters, models, vLLM's arguments.

`python docs/generate.py` writes the pages; `pages()` returns them, so that a test can compare. Imports no torch.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import api_page
import architectures_page
import arguments_page
import commands_page
import included
import sampling_page
import settings_page
from tables import our_providers, table

#: What was measured of each class of transformers, in columns.
MEASURED = Path(__file__).parent / "data" / "any_class.tsv"
FOLDER = Path(__file__).parent / "reference"
_MADE = "<!-- Made by docs/generate.py; change the code, not this page. -->\n"


def pages() -> dict[str, str]:
    """File name in docs/reference → its content."""
    made = {
        "configuration.md": settings_page.page(),
        "cli.md": commands_page.page(),
        "sampling.md": sampling_page.page(),
        "architectures.md": architectures_page.page(),
        "any-class.md": _classes(),
        "vllm-arguments.md": arguments_page.page(),
        "api.md": api_page.page(),
    }
    return {name: _MADE + "\n" + text.rstrip() + "\n" for name, text in made.items()}


def _classes() -> str:
    """From the table that `python -m tests.models.any_class` measures."""
    ours = {provider.name for provider in our_providers("model")}
    rows, found = [], Counter[str]()
    for line in MEASURED.read_text(encoding="utf-8").splitlines():
        name, _, how, why = (f"{line}\t\t").split("\t")[:4]
        found[how] += 1
        rows.append((f"`{name}`", "native" if name in ours else how, "" if name in ours else why))
    return "\n\n".join((
        "# Classes of transformers",
        "The classes that transformers 5.23 generates with, and how frame runs each: by a file of its own (native), "
        "around the class with frame's attention and cache (wrapped), by computing a request anew in each step "
        "(recomputed), or not (refused). [Models](../models.md#any-other-architecture) says what that means. Of a "
        'class that was "not made" no tiny checkpoint could be written.',
        f"Around transformers' own class (`--model-impl transformers`), of {found.total() - found['not made']} classes "
        f"with a tiny random checkpoint {found['wrapped'] + found['recomputed']} give its greedy tokens. Classes of "
        "frame's own are compared in [Architectures](architectures.md).",
        table(("class", "runs", "why not otherwise"), rows),
    ))  # fmt: skip


def main() -> None:
    """Writes every page, and the code of tested files into pages that show it."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for name, text in included.pages().items():
        (FOLDER.parent / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
