"""Writes docs/reference from the code: settings, commands, sampling parameters, models, vLLM's arguments.

`python docs/generate.py` writes the pages; `pages()` returns them, so that a test can compare. Imports no torch.
"""

from __future__ import annotations

from pathlib import Path

import api_page
import arguments_page
import commands_page
import included
import sampling_page
import settings_page
from tables import our_providers, table

FOLDER = Path(__file__).parent / "reference"
_MADE = "<!-- Made by docs/generate.py; change the code, not this page. -->\n"


def pages() -> dict[str, str]:
    """File name in docs/reference → its content."""
    made = {
        "configuration.md": settings_page.page(),
        "cli.md": commands_page.page(),
        "sampling.md": sampling_page.page(),
        "architectures.md": _architectures(),
        "vllm-arguments.md": arguments_page.page(),
        "api.md": api_page.page(),
    }
    return {name: _MADE + "\n" + text.rstrip() + "\n" for name, text in made.items()}


def _architectures() -> str:
    rows = [(f"`{provider.name}`", provider.summary) for provider in our_providers("model")]
    return "\n\n".join(
        (
            "# Architectures",
            "The names that `architectures` in config.json may hold; packages add more.",
            table(("architecture", "family"), rows),
        )
    )


def main() -> None:
    """Writes every page, and the code of tested files into pages that show it."""
    FOLDER.mkdir(exist_ok=True)
    for name, text in pages().items():
        (FOLDER / name).write_text(text, encoding="utf-8")
    for name, text in included.pages().items():
        (FOLDER.parent / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
