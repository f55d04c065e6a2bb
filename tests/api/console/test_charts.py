"""Charts: positions of values, gaps and escaped text, checked in the SVG."""

from __future__ import annotations

import html
import json
import re
from xml.etree import ElementTree

from tinkerflow.api.console.charts import bars, chart
from tinkerflow.backend.core.plot import Line


def svg_of(figure: str) -> ElementTree.Element:
    return ElementTree.fromstring(figure[figure.index("<svg") : figure.index("</svg>") + 6])


def test_a_line_has_gaps_where_a_value_is_missing() -> None:
    figure = chart("Loss", [Line("a", [(1, 2.0), (2, 1.0), (3, None), (4, 3.0)])])
    (line,) = [one for one in svg_of(figure).iter() if one.get("class") == "line line-0"]
    assert line.get("d", "").count("M") == 2 and line.get("d", "").count("L") == 1
    data = json.loads(html.unescape(re.findall(r'data-chart="(.*?)"', figure)[0]))
    assert data["lines"] == [{"name": "a", "points": [[1, 2.0], [2, 1.0], [4, 3.0]]}]
    assert '<b class="last">3</b>' in figure
    assert [one.text for one in svg_of(figure).iter() if one.tag.endswith("text")][-1] == "step"
    hours = chart("Tokens", [Line("a", [(-1, 2.0), (0, 1.0)])], across="hours from now")
    assert ">hours from now</text>" in hours


def test_names_cannot_become_markup() -> None:
    figure = chart("<b>", [Line("<script>", [(1, 1.0)]), Line('"x', [(1, 2.0)])])
    assert "<script>" not in figure and "&lt;script&gt;" in figure
    svg_of(figure)
    svg_of(bars("<x>", [("<y>", 1.0, "<z>")]))


def test_equal_and_missing_values_are_drawn_too() -> None:
    assert "no values yet" in chart("Loss", [Line("a", [(1, None)])])
    for value in (0.0, 5.0, -3.0, 1e-12, 1e12):
        svg_of(chart("Loss", [Line("a", [(7, value)])]))
    banded = chart("Loss", [Line("a", [(1, 1.0), (2, 2.0)], band=[(1, 0.5, 1.5), (2, 1.0, 9.0)])])
    assert 'class="band line-0"' in banded


def test_a_logarithmic_chart_needs_a_value_above_zero() -> None:
    assert "no values above zero" in chart("Loss", [Line("a", [(1, 0.0), (2, -1.0)])], log=True)
    numbers = [one.text for one in svg_of(chart("Loss", [Line("a", [(1, 0.01), (2, 100.0)])], log=True)).iter()]
    assert {"0.01", "1", "100"} <= set(numbers)


def test_parts_of_a_bar_fill_it() -> None:
    drawn = svg_of(bars("Memory", [("a", 1.0, "1"), ("b", 3.0, "3")]))
    assert [(one.get("x"), one.get("width")) for one in drawn] == [("0", "25"), ("25", "75")]
