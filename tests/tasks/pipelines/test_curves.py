"""Pictures of curves: well-formed SVG, with all finite values inside the panels."""

from __future__ import annotations

import base64
from xml.etree import ElementTree

from tinkerflow.tasks.pipelines.curves import HEIGHT, WIDTH, data_url, picture

SVG = "{http://www.w3.org/2000/svg}"


def test_curve_lines_stay_inside_their_panel() -> None:
    falling = [(step, 1 / step) for step in range(1, 50)]
    svg = picture({"loss <&>": {"train": falling, "held out": [(10, 0.5)]}, "rate": {"rate": [(1, 3.0), (2, 3.0)]}})
    root = ElementTree.fromstring(base64.b64decode(data_url(svg).partition(",")[2]))
    panels = root.findall(f"{SVG}g")
    assert [panel.find(f"{SVG}text").text for panel in panels] == ["loss <&>", "rate"]  # type: ignore[union-attr]
    drawn = [
        path.attrib["d"] for panel in panels for path in panel.iter(f"{SVG}path") if "line-" in path.attrib["class"]
    ]
    lines = [[tuple(map(float, point.split())) for point in path[1:].split("L")] for path in drawn]
    assert [len(line) for line in lines] == [49, 1, 2]
    assert all(0 < x < WIDTH and 0 < y < HEIGHT for line in lines for x, y in line)
    heights = [y for _, y in lines[0]]
    assert heights == sorted(heights)  # falling on the screen, where y grows downwards


def test_non_finite_values_are_left_out_of_the_picture() -> None:
    svg = picture({"loss": {"loss": [(1, float("nan")), (2, float("inf"))]}})
    assert "no values yet" in svg
    assert "nan" not in svg
