"""Line plots as the inside of an SVG picture: grid, numbers, bands, lines and dots. A style sheet colors the classes.

The classes are `grid`, and `line`, `faint`, `band` and `dot`, each with the line's own `line-0`, `line-1` and so on.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeGuard

LINES = 8  # classes `line-0` to `line-7`; further lines start again at `line-0`
_TICKS = 4
_DOTS = 40  # a line of at most this many points gets dots
_LEAST, _MOST = 1e-300, 1e300  # of a range and of a value, so that no difference is rounded to zero or to infinity

Point = tuple[float, float]
Box = tuple[int, int, int, int]  # left, top, right and bottom in pixels; numbers are drawn on its left and below it


@dataclass(frozen=True)
class Line:
    """One line. points: (x, y) from left to right; a y that is None, not finite or beyond 1e300 makes a gap.

    band: (x, low, high), the ranges of the values that the points are means of; drawn behind the line. faint: further
    points, drawn behind it as a faint line.
    """

    name: str
    points: Sequence[tuple[float, float | None]]
    band: Sequence[tuple[float, float | None, float | None]] = ()
    faint: Sequence[tuple[float, float | None]] = ()

    @property
    def known(self) -> list[Point]:
        """The points without the gaps."""
        return [(x, y) for x, y in self.points if _is_known(y)]

    def powers(self) -> Line:
        """The line with the decimal logarithm of each y. Values without a logarithm become gaps."""

        def power(y: float | None) -> float | None:
            return math.log10(y) if _is_known(y) and y > 0 else None

        def powers(points: Sequence[tuple[float, float | None]]) -> list[tuple[float, float | None]]:
            return [(x, power(y)) for x, y in points]

        band = [(x, power(low), power(high)) for x, low, high in self.band]
        return Line(self.name, powers(self.points), band, powers(self.faint))


def plot(
    lines: Sequence[Line], box: Box, number: Callable[[float], str], *, log: bool = False
) -> tuple[str, Point, Point] | None:
    """Draw lines in a box. Returns the SVG elements and the ranges of x and y; None if no line has a point.

    number: formats a value for the axes. log: a logarithmic y axis; the range of y is then in powers of ten.
    """
    left, top, right, bottom = box
    if log:
        lines = [line.powers() for line in lines]
    every = [point for line in lines for point in line.known]
    if not every:
        return None
    bounds = [y for line in lines for _, low, high in line.band for y in (low, high) if _is_known(y)]
    bounds += [y for line in lines for _, y in line.faint if _is_known(y)]
    x_low, x_high = _apart([x for x, _ in every])
    y_low, y_high = _apart([y for _, y in every] + bounds)

    def place(x: float, y: float) -> Point:
        across, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return round(left + across * (right - left), 1), round(bottom - up * (bottom - top), 1)

    def joined(points: Sequence[Point]) -> str:
        return "M" + "L".join(f"{across} {down}" for across, down in points)

    parts: list[str] = []
    for value in _ticks(y_low, y_high):
        _, down = place(x_low, value)
        parts.append(f'<path class="grid" d="M{left} {down}H{right}"/>')
        label = number(float(f"{10**value:.3g}") if log else value)
        parts.append(f'<text x="{left - 6}" y="{down + 4}" text-anchor="end">{label}</text>')
    for value in _ticks(x_low, x_high, whole=all(float(x).is_integer() for x, _ in every)):
        across, _ = place(value, y_low)
        parts.append(f'<text x="{across}" y="{bottom + 18}" text-anchor="middle">{number(value)}</text>')
    for i, line in enumerate(lines):
        color = f"line-{i % LINES}"
        band = [(x, low, high) for x, low, high in line.band if _is_known(low) and _is_known(high)]
        if any(low < high for _, low, high in band):
            around = [place(x, high) for x, _, high in band] + [place(x, low) for x, low, _ in reversed(band)]
            parts.append(f'<path class="band {color}" d="{joined(around)}Z"/>')
        for kind, points in (("faint", line.faint), ("line", line.points)):
            pieces = "".join(joined([place(*point) for point in piece]) for piece in _pieces(points))
            if pieces or kind == "line":
                parts.append(f'<path class="{kind} {color}" d="{pieces}"/>')
        if len(line.known) <= _DOTS:
            for across, down in (place(*point) for point in line.known):
                parts.append(f'<circle class="dot {color}" cx="{across}" cy="{down}" r="2.5"/>')
    return "".join(parts), (x_low, x_high), (y_low, y_high)


def _is_known(value: float | None) -> TypeGuard[float]:
    return value is not None and abs(value) <= _MOST


def _pieces(points: Sequence[tuple[float, float | None]]) -> Iterator[list[Point]]:
    """The runs of points between gaps."""
    piece: list[Point] = []
    for x, y in points:
        if _is_known(y):
            piece.append((x, y))
        elif piece:
            yield piece
            piece = []
    if piece:
        yield piece


def _apart(values: Sequence[float]) -> Point:
    """The lowest and the highest value, moved apart if they are equal."""
    low, high = min(values), max(values)
    half = abs(low) / 2 if abs(low) > _LEAST else 0.5
    return (low, high) if high - low > _LEAST else (low - half, high + half)


def _ticks(low: float, high: float, *, whole: bool = False) -> Iterator[float]:
    """Round values between `low` and `high`, about _TICKS of them. whole: only whole numbers."""
    rough = (high - low) / _TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough * 0.999)
    if whole:
        step = max(1.0, step)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    yield from (n * step for n in range(first, last + 1))
