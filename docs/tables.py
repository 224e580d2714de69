"""Parts that the generated pages share: Markdown tables, default values, and the providers of this distribution."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from frame.core.interfaces.provider import Provider
from frame.core.plugin_host.registry import Registry

_OURS = "frame-llm"


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def shown_default(value: Any) -> str:
    """A default as tables show it: "" where a setting has none."""
    if value in (None, "", [], {}):
        return ""
    if isinstance(value, bool):
        return "on" if value else "off"
    return f"`{value}`"


def our_providers(kind: str | None) -> list[Provider]:
    """Providers of this distribution, whatever else is installed."""
    offers = [offer for offer in Registry.load().offers if offer.package == _OURS and kind in (None, offer.kind)]
    return [offer.provider for offer in offers]
