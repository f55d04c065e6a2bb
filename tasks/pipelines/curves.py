"""Curves as an SVG picture, with a panel for each metric and steps on the horizontal axis."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from xml.sax.saxutils import escape

from tinkerflow.backend.core.plot import LINES, Line, plot

Points = Sequence[tuple[float, float]]

WIDTH, HEIGHT = 420, 220
_LEFT, _RIGHT = 62, WIDTH - 12
_BOX = (_LEFT, 28, _RIGHT, HEIGHT - 26)
_COLORS = ("#2563eb", "#ea580c", "#059669", "#9333ea", "#0891b2", "#ca8a04", "#db2777", "#475569")  # one of LINES each
_STYLE = (
    "text{fill:#444} .grid{stroke:#ddd} .line{fill:none;stroke:currentcolor;stroke-width:1.5} .dot{fill:currentcolor}"
    + "".join(f" .line-{i}{{color:{color}}}" for i, color in enumerate(_COLORS))
)
_COLUMNS = 2


def picture(panels: Mapping[str, Mapping[str, Points]]) -> str:
    """An SVG document. panels: title -> name of a line -> points (step, value). Omits values that are not finite."""
    rows = math.ceil(len(panels) / _COLUMNS)
    width, height = _COLUMNS * WIDTH, rows * HEIGHT
    drawn = [
        f'<g transform="translate({(i % _COLUMNS) * WIDTH},{(i // _COLUMNS) * HEIGHT})">{_panel(title, lines)}</g>'
        for i, (title, lines) in enumerate(panels.items())
    ]
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" '
        f'font-family="sans-serif" font-size="11"><style>{_STYLE}</style>'
        f'<rect width="100%" height="100%" fill="white"/>{"".join(drawn)}</svg>'
    )


def data_url(svg: str) -> str:
    """The picture as a data URL, which needs neither a file nor a server."""
    return "data:image/svg+xml;base64," + base64.b64encode(svg.encode()).decode()


def _panel(title: str, lines: Mapping[str, Points]) -> str:
    heading = f'<text x="{_LEFT}" y="16" font-weight="bold">{escape(title)}</text>'
    drawn = plot([Line(name, points) for name, points in lines.items()], _BOX, "{:.6g}".format)
    if drawn is None:
        return heading + f'<text x="{_LEFT}" y="{HEIGHT // 2}">no values yet</text>'
    names = [
        f'<text class="dot line-{i % LINES}" x="{_RIGHT - 100 * (len(lines) - 1 - i)}" y="16" text-anchor="end">'
        f"{escape(name)}</text>"
        for i, name in enumerate(lines)
    ]
    return heading + drawn[0] + ("".join(names) if len(names) > 1 else "")
