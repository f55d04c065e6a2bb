"""The points of a sweep: every combination of the values that its grid lists."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tinkerflow.tasks.pipelines.parameters import SweepParameters

_SECTIONS = {"rank": "model", "seed": "model"}  # all others are of `training`
_LOGARITHMIC = {"learning_rate"}


@dataclass(frozen=True)
class Point:
    """One combination. values: name -> value of what the grid varies.

    axis, x, line: where it is in a picture: the name of the first parameter that varies, this point's value of it (its
    logarithm where that is how people step through it), and the other values as a text.
    """

    values: Mapping[str, Any]
    axis: str
    x: float
    line: str

    @property
    def label(self) -> str:
        """For people."""
        return ", ".join(f"{name} {value:g}" for name, value in self.values.items())

    @property
    def slug(self) -> str:
        """For the name of a run: small letters, digits and dashes."""
        text = "-".join(f"{value:g}" for value in self.values.values())
        return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")

    @property
    def changes(self) -> dict[str, dict[str, Any]]:
        """Section of the parameters -> name -> value."""
        found: dict[str, dict[str, Any]] = {}
        for name, value in self.values.items():
            found.setdefault(_SECTIONS.get(name, "training"), {})[name] = value
        return found


def points(parameters: SweepParameters) -> list[Point]:
    """All combinations of the grid, each once."""
    lists: dict[str, list[Any]] = {
        name: list(dict.fromkeys(values)) for name, values in parameters.grid.model_dump().items() if values
    }
    axis = next((name for name, values in lists.items() if len(values) > 1), next(iter(lists)))
    found = []
    for combination in itertools.product(*lists.values()):
        values = dict(zip(lists, combination, strict=True))
        others = [f"{name} {value:g}" for name, value in values.items() if name != axis and len(lists[name]) > 1]
        x = math.log10(values[axis]) if axis in _LOGARITHMIC else float(values[axis])
        shown = f"log10({axis})" if axis in _LOGARITHMIC else axis
        found.append(Point(values, shown, x, ", ".join(others) or "all"))
    return found
