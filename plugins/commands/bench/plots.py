"""Plots as SVG text, for pages with a light or a dark background, drawn without a library.

Series differ by colour, dash and marker, so that readers can distinguish them without colour. Colours are the page's
variables `--s0` … `--s5`, `--ink`, `--grid` and `--back` (see `report`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Literal

WIDTH, HEIGHT = 560, 340
_LEFT, _RIGHT, _TOP, _BOTTOM = 72, 16, 52, 52
_DASHES = ("", "7 4", "2 3", "9 3 2 3", "4 2", "12 4")
_NUM_COLOURS = 6
_MAX_POINTS = 600


@dataclass(frozen=True)
class Series:
    """Points in the plot's units, joined by a line, by steps, or not.

    `notes` are shown at points under the mouse, and with `labelled` beside them.
    """

    name: str
    points: Sequence[tuple[float, float]]
    style: Literal["line", "step", "points"] = "line"
    notes: Sequence[str] = field(default=())
    labelled: bool = False


@dataclass(frozen=True)
class Plot:
    """Axis labels carry their unit, as in "time (s)". `zero` makes both axes begin at 0."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    zero: bool = True


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers (1, 2 or 5 times a power of ten apart) that cover [low, high]."""
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-3):
        high = low + max(abs(low), 1e-3)
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    return [index * step for index in range(first, last + 1)]


def number(value: float) -> str:
    """A tick's text: no more digits than it needs, thousands set apart."""
    if value == 0:
        return "0"
    if abs(value) >= 1e6:
        return f"{value / 1e6:g}M"
    if abs(value) >= 1000:
        return f"{value:,.0f}"
    return f"{value:.4g}"


def svg(plot: Plot) -> str:
    """The plot as one `<svg>` element."""
    points = [point for series in plot.series for point in series.points]
    if not points:
        return f'<p class="empty">{escape(plot.title)}: nothing was measured.</p>'
    x_ticks = _axis([x for x, _ in points], plot.zero)
    y_ticks = _axis([y for _, y in points], plot.zero)

    def place_x(x: float) -> float:
        return _LEFT + (x - x_ticks[0]) / (x_ticks[-1] - x_ticks[0]) * (WIDTH - _LEFT - _RIGHT)

    def place_y(y: float) -> float:
        return HEIGHT - _BOTTOM - (y - y_ticks[0]) / (y_ticks[-1] - y_ticks[0]) * (HEIGHT - _TOP - _BOTTOM)

    label = escape(f"{plot.title}: {plot.y_label} over {plot.x_label}", quote=True)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">',
        _text(_LEFT, 20, plot.title, "title"),
        *(_grid_x(place_x(tick), number(tick)) for tick in x_ticks),
        *(_grid_y(place_y(tick), number(tick)) for tick in y_ticks),
        _text((_LEFT + WIDTH - _RIGHT) / 2, HEIGHT - 12, plot.x_label, "label", "middle"),
        f'<text class="label" text-anchor="middle" transform="translate(16 {(HEIGHT - _BOTTOM + _TOP) / 2:.1f}) '
        f'rotate(-90)">{escape(plot.y_label)}</text>',
    ]
    for index, series in enumerate(plot.series):
        parts.append(_series(series, index, place_x, place_y))
    parts += _legend(plot.series)
    return "\n".join([*parts, "</svg>"])


def distribution(values: Sequence[float]) -> list[tuple[float, float]]:
    """The cumulative distribution as (value, percent of values up to it), thinned for drawing."""
    ordered = sorted(values)
    last = len(ordered) - 1
    step = max(1, math.ceil(len(ordered) / _MAX_POINTS))
    places = sorted({*range(0, len(ordered), step), last} if ordered else ())
    return [(ordered[place], 100 * (place + 1) / len(ordered)) for place in places]


def _axis(values: Sequence[float], zero: bool) -> list[float]:
    low, high = min(values), max(values)
    return ticks(min(0.0, low) if zero else low, high)


def _text(x: float, y: float, text: str, kind: str, anchor: str = "start") -> str:
    return f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _grid_x(x: float, text: str) -> str:
    bottom = HEIGHT - _BOTTOM
    line = f'<line class="grid" x1="{x:.1f}" y1="{_TOP}" x2="{x:.1f}" y2="{bottom}"/>'
    return line + _text(x, bottom + 16, text, "tick", "middle")


def _grid_y(y: float, text: str) -> str:
    line = f'<line class="grid" x1="{_LEFT}" y1="{y:.1f}" x2="{WIDTH - _RIGHT}" y2="{y:.1f}"/>'
    return line + _text(_LEFT - 6, y + 4, text, "tick", "end")


def _series(series: Series, index: int, place_x: Callable[[float], float], place_y: Callable[[float], float]) -> str:
    colour = f"var(--s{index % _NUM_COLOURS})"
    places = [(place_x(x), place_y(y)) for x, y in series.points]
    if series.style == "points":
        drawn = "".join(_marker(x, y, index, colour, note) for (x, y), note in _noted(places, series.notes))
        return drawn + _labels(series, places)
    path = [f"M{places[0][0]:.1f} {places[0][1]:.1f}"] if places else []
    for x, y in places[1:]:
        path.append(f"H{x:.1f}V{y:.1f}" if series.style == "step" else f"L{x:.1f} {y:.1f}")
    drawn = f'<path class="line" d="{"".join(path)}" stroke="{colour}" stroke-dasharray="{_dash(index)}"/>'
    if series.notes or len(places) == 1:
        drawn += "".join(_marker(x, y, index, colour, note) for (x, y), note in _noted(places, series.notes))
    return drawn + _labels(series, places)


def _noted(places: Sequence[tuple[float, float]], notes: Sequence[str]) -> list[tuple[tuple[float, float], str]]:
    return [(place, notes[at] if at < len(notes) else "") for at, place in enumerate(places)]


def _marker(x: float, y: float, index: int, colour: str, note: str) -> str:
    inside = f"<title>{escape(note)}</title>" if note else ""
    if index % 2:
        return (
            f'<rect class="mark" x="{x - 4:.1f}" y="{y - 4:.1f}" width="8" height="8" fill="{colour}">{inside}</rect>'
        )
    return f'<circle class="mark" cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}">{inside}</circle>'


def _dash(index: int) -> str:
    return _DASHES[index % len(_DASHES)]


def _legend(series: Sequence[Series]) -> list[str]:
    """One line under the title, where there is more than one series."""
    parts: list[str] = []
    x = float(_LEFT)
    for index, one in enumerate(series if len(series) > 1 else ()):
        colour = f"var(--s{index % _NUM_COLOURS})"
        if one.style == "points":
            parts.append(_marker(x + 12, 36, index, colour, ""))
        else:
            parts.append(f'<path class="line" d="M{x:.1f} 36h24" stroke="{colour}" stroke-dasharray="{_dash(index)}"/>')
        parts.append(_text(x + 30, 40, one.name, "tick"))
        x += 54 + 6.5 * len(one.name)
    return parts


def _labels(series: Series, places: Sequence[tuple[float, float]]) -> str:
    if not series.labelled:
        return ""
    parts = []
    for (x, y), note in _noted(places, series.notes):
        # Up and to the left is free of a rising line.
        left = x - _LEFT > 7 * len(note)
        parts.append(_text(x - 8 if left else x + 8, y - 7, note, "tick", "end" if left else "start"))
    return "".join(parts)
