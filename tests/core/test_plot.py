"""SVG plots: positions of values, gaps in lines, and round numbers on axes."""

from __future__ import annotations

import math
import re

import pytest

from tinkerflow.backend.core.plot import Line, plot

BOX = (10, 0, 110, 100)


def drawn(*lines: Line) -> str:
    made = plot(lines, BOX, "{:g}".format)
    assert made is not None
    return made[0]


def test_values_have_their_places() -> None:
    made = plot([Line("a", [(0, 0.0), (10, 5.0)]), Line("b", [(5, 2.5)])], BOX, "{:g}".format)
    assert made is not None and made[1:] == ((0, 10), (0.0, 5.0))
    assert 'class="line line-0" d="M10.0 100.0L110.0 0.0"' in made[0]
    assert 'class="dot line-1" cx="60.0" cy="50.0"' in made[0]


def test_lines_have_gaps_where_no_finite_value_is() -> None:
    svg = drawn(Line("a", [(0, 1.0), (1, None), (2, 2.0), (3, math.nan), (4, 3.0), (5, 3.0)]))
    (path,) = re.findall('class="line line-0" d="(.*?)"', svg)
    assert path.count("M") == 3 and path.count("L") == 1
    assert plot([Line("a", [(0, None), (1, math.inf)])], BOX, str) is None


@pytest.mark.parametrize(("low", "high"), [(0.0, 5e-324), (2e-323, 2e-323), (-1e300, 1e300)])
def test_smallest_and_largest_values_are_inside_the_box(low: float, high: float) -> None:
    heights = [float(y) for y in re.findall(r'cy="(.*?)"', drawn(Line("a", [(0, low), (1, high)])))]
    assert len(heights) == 2 and all(0.0 <= y <= 100.0 for y in heights)


def test_values_whose_differences_overflow_are_gaps() -> None:
    assert plot([Line("a", [(0, 1.7e308), (1, -1.7e308)])], BOX, str) is None
    assert drawn(Line("a", [(0, 1.7e308), (1, 2.0)])).count("<circle") == 1


def test_axes_have_round_numbers_whole_ones_where_all_are() -> None:
    numbers = re.findall(r">(\S+?)</text>", drawn(Line("a", [(1, 0.0), (3, 1.0)])))
    assert numbers == ["0", "0.5", "1", "1", "2", "3"]
    numbers = re.findall(r">(\S+?)</text>", drawn(Line("a", [(1e-4, 0.0), (5e-4, 1.0)])))
    assert numbers[3:] == ["0.0001", "0.0002", "0.0003", "0.0004", "0.0005"]


def test_a_logarithmic_axis_has_equal_distances_for_equal_factors() -> None:
    made = plot([Line("a", [(0, 1.0), (1, 10.0), (2, 0.0), (3, 100.0)])], BOX, "{:g}".format, log=True)
    assert made is not None and made[2] == (0.0, 2.0)
    assert [float(y) for y in re.findall(r'cy="(.*?)"', made[0])] == [100.0, 50.0, 0.0], "zero has no place"
    assert plot([Line("a", [(0, 0.0), (1, -1.0)])], BOX, "{:g}".format, log=True) is None


def test_faint_points_are_drawn_behind_and_inside_the_box() -> None:
    svg = drawn(Line("a", [(0, 2.0), (1, 2.0)], faint=[(0, 0.0), (1, 4.0)]))
    assert svg.index('class="faint line-0" d="M10.0 100.0L110.0 0.0"') < svg.index('class="line line-0"')
