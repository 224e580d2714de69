"""A benchmark's results as one HTML file that loads nothing from elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from frame.settings import ConfigError

from .plots import Plot, svg

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --grid: #d8dee4; --back: #ffffff; --panel: #f6f8fa;
  --s0: #0068b5; --s1: #c2410c; --s2: #0a7d55; --s3: #9d3c8c; --s4: #7a6000; --s5: #475569; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa7b4; --grid: #30363d; --back: #0d1117; --panel: #161b22;
    --s0: #58a6ff; --s1: #ff9a5c; --s2: #3fc99a; --s3: #e28bd3; --s4: #d9b84a; --s5: #a8b3c0; } }
body { margin: 0 auto; max-width: 74rem; padding: 1.5rem; background: var(--back); color: var(--ink);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.5rem; margin: 0 0 .3rem; } h2 { font-size: 1.1rem; margin: 2rem 0 .6rem; }
p.about, p.empty { color: var(--soft); margin: 0 0 1rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { padding: .25rem .8rem; border-bottom: 1px solid var(--grid); text-align: right; }
th:first-child, td:first-child { text-align: left; } thead th { color: var(--soft); font-weight: 600; }
.wide { overflow-x: auto; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(100%, 30rem), 1fr)); gap: 1rem; }
.plots > * { background: var(--panel); border-radius: 8px; padding: .6rem; box-sizing: border-box; width: 100%; }
svg .title { font: 600 15px system-ui, sans-serif; fill: var(--ink); }
svg .label { font: 13px system-ui, sans-serif; fill: var(--ink); }
svg .tick { font: 12px system-ui, sans-serif; fill: var(--soft); }
svg .grid { stroke: var(--grid); stroke-width: 1; } svg .line { fill: none; stroke-width: 2; }
svg .mark { stroke: var(--panel); stroke-width: 1; }
"""


class Table:
    """Rows of cells under column names; numbers are shown to at most five digits."""

    def __init__(self, title: str, columns: Sequence[str], rows: Sequence[Sequence[Any]]) -> None:
        self.title, self.columns, self.rows = title, columns, rows

    def html(self) -> str:
        """The table and its heading."""
        head = "".join(f"<th>{escape(name)}</th>" for name in self.columns)
        body = "\n".join(
            "<tr>" + "".join(f"<td>{escape(shown(cell))}</td>" for cell in row) + "</tr>" for row in self.rows
        )
        return (
            f'<h2>{escape(self.title)}</h2>\n<div class="wide"><table><thead><tr>{head}</tr></thead>\n'
            f"<tbody>\n{body}\n</tbody></table></div>"
        )


def shown(value: Any) -> str:
    """A value as tables and pages show it."""
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.5g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def page(title: str, about: str, tables: Sequence[Table], plots: Sequence[Plot]) -> str:
    """The whole document."""
    drawn = "\n".join(f"<div>{svg(plot)}</div>" for plot in plots)
    return "\n".join([
        "<!doctype html>",
        '<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>{escape(title)}</h1>",
        f'<p class="about">{escape(about)}</p>',
        f'<div class="plots">{drawn}</div>' if plots else "",
        *(table.html() for table in tables),
        "</body></html>",
        "",
    ])  # fmt: skip


def fact_table(title: str, facts: Mapping[str, Any]) -> Table:
    """Names and values, one a row."""
    return Table(title, ("", "value"), [(name, value) for name, value in facts.items()])


def write_text(path: str | Path, text: str) -> None:
    """Writes a result, its folders included; raises `ConfigError` where that fails."""
    target = Path(path).expanduser()
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{target} cannot be written: {error.strerror}") from None
