"""Charts as HTML figures, drawn by the server. The script (static/console.js) shows the values under the pointer."""

from __future__ import annotations

from collections.abc import Sequence

import orjson
from markupsafe import Markup, escape

from tinkerflow.api.console.render import NONE, number
from tinkerflow.backend.core.plot import LINES, Line, plot

WIDTH, HEIGHT = 520, 244
_BOX = (56, 10, WIDTH - 12, HEIGHT - 40)


def chart(title: str, lines: Sequence[Line], *, across: str = "step", log: bool = False, zooms: bool = False) -> Markup:
    """A figure with one chart: its title, axes and lines, and the values for the script.

    across: the label of the x axis. log: use a logarithmic y axis. zooms: let people select a range of x.
    """
    drawn = plot(lines, _BOX, number, log=log)
    if drawn is None:
        none = "no values above zero" if log and any(line.known for line in lines) else "no values yet"
        return Markup('<figure class="chart"><figcaption>{}</figcaption><p class="empty">{}</p></figure>').format(
            title, none
        )
    shapes, x, y = drawn
    values = [{"name": line.name, "points": line.known} for line in lines]
    data = {"x": x, "y": y, "box": _BOX, "across": across, "lines": values, "zooms": zooms}
    ends = ", ".join(f"{line.name} ends at {number(line.known[-1][1])}" for line in lines if line.known)
    label = escape(f"{title} by {across}: {ends}")
    middle = (_BOX[0] + _BOX[2]) // 2
    below = f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(across)}</text>'
    size = f"0 0 {WIDTH} {HEIGHT}"
    svg = f'<svg viewBox="{size}" role="img" aria-label="{label}">{shapes}{below}<path class="cross" d=""/></svg>'
    return Markup(
        '<figure class="chart" data-chart="{}"><figcaption>{} {}</figcaption>{}<output hidden></output></figure>'
    ).format(orjson.dumps(data).decode(), title, _legend(lines), Markup(svg))


def bars(title: str, parts: Sequence[tuple[str, float, str]]) -> Markup:
    """One bar, divided among `parts` (name, amount, text for the legend) in proportion to their amounts."""
    drawn, right, whole = [], 0.0, sum(amount for _, amount, _ in parts)
    for i, (name, amount, text) in enumerate(parts):
        width = round(100 * amount / whole, 3) if whole > 0 else 0.0
        label = escape(f"{name}: {text}")
        shape = f'x="{right:g}" width="{width:g}" height="10"'
        drawn.append(f'<rect class="part line-{i % LINES}" {shape}><title>{label}</title></rect>')
        right += width
    legend = Markup("").join(
        Markup('<li><i class="key line-{}"></i>{} <b>{}</b></li>').format(i % LINES, name, text)
        for i, (name, _, text) in enumerate(parts)
    )
    svg = Markup('<svg viewBox="0 0 100 10" preserveAspectRatio="none" role="img" aria-label="{}">{}</svg>')
    return Markup('<figure class="bar">{}<figcaption><ul class="legend">{}</ul></figcaption></figure>').format(
        svg.format(title, Markup("".join(drawn))), legend
    )


def _legend(lines: Sequence[Line]) -> Markup:
    """The last value of each line, with colors and names if there are several lines."""
    last = [number(line.known[-1][1]) if line.known else NONE for line in lines]
    if len(lines) == 1:
        return Markup('<b class="last">{}</b>').format(last[0])
    items = (
        Markup('<li><i class="key line-{}"></i>{} <b class="last">{}</b></li>').format(i % LINES, line.name, last[i])
        for i, line in enumerate(lines)
    )
    return Markup('<ul class="legend">{}</ul>').format(Markup("").join(items))
