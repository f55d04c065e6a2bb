"""Easy rows first: the pool of rows that a step of `rl` may pick from (Bengio et al., 2009, "Curriculum Learning")."""

from __future__ import annotations

from collections.abc import Sequence

from tinkerflow.backend.core.errors import UserError
from tinkerflow.tasks.pipelines.parameters import CurriculumParameters
from tinkerflow.tasks.pipelines.rows import Row


class Curriculum:
    """A pool of rows that grows from the easiest ones to all."""

    def __init__(self, rows: Sequence[Row], parameters: CurriculumParameters, steps: int, least: int) -> None:
        """steps: number of training steps. least: minimum size of a pool. UserError: a row has no difficulty."""
        self._easiest_first = sorted(rows, key=lambda row: _difficulty(row, parameters.by))  # stable for equal rows
        self._first = parameters.first
        self._least = min(least, len(rows))
        self._last_step = parameters.until * steps

    def pool(self, step: int) -> Sequence[Row]:
        """The rows of step `step` (from 0), easiest first. Their number grows linearly."""
        done = min(step / self._last_step, 1.0) if self._last_step else 1.0
        share = self._first + (1.0 - self._first) * done
        return self._easiest_first[: max(self._least, round(share * len(self._easiest_first)))]


def _difficulty(row: Row, field: str) -> float:
    value = row.extra.get(field)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    prompt = row.prompt[-1]["content"]
    raise UserError(f"curriculum.by {field!r}: is {value!r} in the row {prompt[:40]!r}: must be a number")
