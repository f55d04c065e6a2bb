"""Line charts as SVG, drawn by the server. The script (static/console.js) shows the values under the pointer."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import orjson
from markupsafe import Markup, escape

from tinkerflow.api.console.render import NONE, number

WIDTH, HEIGHT = 520, 230
LINES = 8  # colours that the style sheet has: `.line-0` to `.line-7`
_LEFT, _RIGHT, _TOP, _BOTTOM = 56, 12, 10, 26
_TICKS = 4
_DOTS = 40  # up to so many points, each has a dot


@dataclass(frozen=True)
class Line:
    """One line of a chart. points: (x, y) from left to right; where y is None the line has a gap.

    band: (x, low, high), the range that the points are means of; drawn behind the line.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    band: Sequence[tuple[float, float | None, float | None]] = ()


def chart(title: str, lines: Sequence[Line], *, across: str = "step") -> Markup:
    """A figure with one chart: its title, axes, lines, and the values for the script. across: what x counts."""
    known = [[(x, y) for x, y in line.points if y is not None] for line in lines]
    every = [point for points in known for point in points]
    if not every:
        return Markup(
            '<figure class="chart"><figcaption>{}</figcaption><p class="empty">no values yet</p></figure>'
        ).format(title)
    x_low, x_high = _apart(min(x for x, _ in every), max(x for x, _ in every))
    bounds = [y for line in lines for _, low, high in line.band for y in (low, high) if y is not None]
    y_low, y_high = _apart(min([y for _, y in every] + bounds), max([y for _, y in every] + bounds))
    y_ticks = list(_ticks(y_low, y_high))

    def place(x: float, y: float) -> tuple[float, float]:
        right = _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        down = HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)
        return round(right, 1), round(down, 1)

    parts: list[str] = []
    for value in y_ticks:
        _, down = place(x_low, value)
        parts.append(f'<path class="grid" d="M{_LEFT} {down}H{WIDTH - _RIGHT}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{down + 4}" text-anchor="end">{number(value)}</text>')
    for value in _ticks(x_low, x_high, whole=True):
        right, _ = place(value, y_low)
        parts.append(f'<text x="{right}" y="{HEIGHT - 8}" text-anchor="middle">{number(value)}</text>')
    for i, line in enumerate(lines):
        band = [(x, low, high) for x, low, high in line.band if low is not None and high is not None]
        if any(low < high for _, low, high in band):
            there = [place(x, high) for x, _, high in band]
            back = [place(x, low) for x, low, _ in reversed(band)]
            path = "L".join(f"{right} {down}" for right, down in (*there, *back))
            parts.append(f'<path class="band line-{i % LINES}" d="M{path}Z"/>')
        parts.append(f'<path class="line line-{i % LINES}" d="{_path(line, place)}"/>')
        if len(known[i]) <= _DOTS:
            dots = (place(x, y) for x, y in known[i])
            parts += [
                f'<circle class="dot line-{i % LINES}" cx="{right}" cy="{down}" r="2.5"/>' for right, down in dots
            ]
    data = {
        "x": [x_low, x_high],
        "y": [y_low, y_high],
        "box": [_LEFT, _TOP, WIDTH - _RIGHT, HEIGHT - _BOTTOM],
        "across": across,
        "lines": [{"name": line.name, "points": points} for line, points in zip(lines, known, strict=True)],
    }
    said = ", ".join(
        f"{line.name} ends at {number(points[-1][1])}" for line, points in zip(lines, known, strict=True) if points
    )
    label = escape(f"{title} by {across}: {said}")
    svg = (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        + "".join(parts)
        + '<path class="cross" d=""/></svg>'
    )
    return Markup(
        '<figure class="chart" data-chart="{}"><figcaption>{} {}</figcaption>{}<output hidden></output></figure>'
    ).format(orjson.dumps(data).decode(), title, _legend(lines, known), Markup(svg))


def bars(title: str, parts: Sequence[tuple[str, float]], whole: float, text: Sequence[str]) -> Markup:
    """One bar of `parts` (name, amount) of a `whole`, with a legend that has the `text` of each."""
    drawn, right = [], 0.0
    for i, (name, amount) in enumerate(parts):
        width = round(100 * amount / whole, 3) if whole > 0 else 0.0
        label = escape(f"{name}: {text[i]}")
        shape = f'x="{right:g}" width="{width:g}" height="10"'
        drawn.append(f'<rect class="part line-{i % LINES}" {shape}><title>{label}</title></rect>')
        right += width
    legend = Markup("").join(
        Markup('<li><i class="key line-{}"></i>{} <b>{}</b></li>').format(i % LINES, name, text[i])
        for i, (name, _) in enumerate(parts)
    )
    svg = Markup('<svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>')
    return Markup('<figure class="bar">{}<figcaption><ul class="legend">{}</ul></figcaption></figure>').format(
        svg.format(title, Markup("".join(drawn))), legend
    )


def _legend(lines: Sequence[Line], known: Sequence[Sequence[tuple[float, float]]]) -> Markup:
    """The last value of each line, with its colour and name where there are several."""
    last = [number(points[-1][1]) if points else NONE for points in known]
    if len(lines) == 1:
        return Markup('<b class="last">{}</b>').format(last[0])
    items = (
        Markup('<li><i class="key line-{}"></i>{} <b class="last">{}</b></li>').format(i % LINES, line.name, last[i])
        for i, line in enumerate(lines)
    )
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))


def _path(line: Line, place: Callable[[float, float], tuple[float, float]]) -> str:
    parts, pen = [], "M"
    for x, y in line.points:
        if y is None:
            pen = "M"
            continue
        right, down = place(x, y)
        parts.append(f"{pen}{right} {down}")
        pen = "L"
    return "".join(parts)


def _apart(low: float, high: float) -> tuple[float, float]:
    """The two, moved apart when they are equal."""
    return (low, high) if high > low else (low - (abs(low) / 2 or 0.5), high + (abs(high) / 2 or 0.5))


def _ticks(low: float, high: float, *, whole: bool = False) -> Iterator[float]:
    """Round values between the two, about _TICKS of them. whole: only whole numbers."""
    rough = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    yield from (n * step for n in range(first, last + 1))
