"""Curves as an SVG picture: one panel for each metric, steps from left to right."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 420, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 62, 12, 28, 24
_COLOURS = ("#2563eb", "#ea580c", "#059669", "#9333ea")
_COLUMNS = 2


def picture(panels: Mapping[str, Mapping[str, Points]]) -> str:
    """An SVG document: title -> name of a line -> its points (step, value). Values that are not finite are left out."""
    rows = math.ceil(len(panels) / _COLUMNS)
    width, height = _COLUMNS * WIDTH, rows * HEIGHT
    drawn = [
        f'<g transform="translate({(i % _COLUMNS) * WIDTH},{(i // _COLUMNS) * HEIGHT})">{_panel(title, lines)}</g>'
        for i, (title, lines) in enumerate(panels.items())
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><rect width="100%" height="100%" fill="white"/>{"".join(drawn)}</svg>'
    )


def data_url(svg: str) -> str:
    """The picture as a data URL, which needs no file and no server."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _panel(title: str, lines: Mapping[str, Points]) -> str:
    kept = {name: [(x, y) for x, y in points if math.isfinite(y)] for name, points in lines.items()}
    every = [point for points in kept.values() for point in points]
    heading = f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(title)}</text>'
    if not every:
        return heading + f'<text x="{_LEFT}" y="{HEIGHT // 2}" fill="#666">no values yet</text>'
    x_low, x_high = _span([x for x, _ in every])
    y_low, y_high = _span([y for _, y in every])

    def place(x: float, y: float) -> str:
        across = _LEFT + (x - x_low) / (x_high - x_low) * (WIDTH - _LEFT - _RIGHT)
        down = HEIGHT - _BOTTOM - (y - y_low) / (y_high - y_low) * (HEIGHT - _TOP - _BOTTOM)
        return f"{across:.1f},{down:.1f}"

    parts = [heading]
    for i in range(4):
        value = y_low + (y_high - y_low) * i / 3
        y = float(place(x_low, value).split(",")[1])
        parts.append(f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="#ddd"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end" fill="#444">{value:.3g}</text>')
    for at, anchor, value in ((_LEFT, "start", x_low), (WIDTH - _RIGHT, "end", x_high)):
        parts.append(f'<text x="{at}" y="{HEIGHT - 8}" text-anchor="{anchor}" fill="#444">{value:g}</text>')
    for i, (name, points) in enumerate(kept.items()):
        colour = _COLOURS[i % len(_COLOURS)]
        path = " ".join(place(x, y) for x, y in points)
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="1.5" points="{path}"/>')
        parts += [
            f'<circle cx="{dot.split(",")[0]}" cy="{dot.split(",")[1]}" r="2.5" fill="{colour}"/>'
            for dot in (path.split(" ") if len(points) <= 20 else [])
            if dot
        ]
        if len(kept) > 1:
            at = WIDTH - _RIGHT - 100 * (len(kept) - 1 - i)
            parts.append(f'<text x="{at}" y="16" text-anchor="end" fill="{colour}">{escape(name)}</text>')
    return "".join(parts)


def _span(values: Sequence[float]) -> tuple[float, float]:
    """The lowest and the highest value, moved apart when they are equal."""
    low, high = min(values), max(values)
    return (low, high) if high > low else (low - 0.5 * abs(low) - 1e-9, high + 0.5 * abs(high) + 1e-9)
