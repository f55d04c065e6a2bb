"""The interface of trackers, and the runs and values that they receive."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Literal, Protocol

from tinkerflow.backend.core.errors import UserError

Outcome = Literal["unfinished", "finished", "failed"]


@dataclass(frozen=True)
class TrackedRun:
    """A run to show. id: the same in every process that writes the run. project: groups runs. name: for people."""

    id: str
    project: str
    name: str
    tags: tuple[str, ...]
    config: Mapping[str, str | int | float | bool]

    @property
    def slug(self) -> str:
        """The id with other characters than letters, digits and ._- replaced, for folders and for some trackers."""
        return re.sub(r"[^A-Za-z0-9._-]+", "-", self.id)


@dataclass(frozen=True)
class StepRow:
    """Values of one step by name. at: when they were measured."""

    step: int
    at: datetime
    values: Mapping[str, float]


class Writer(Protocol):
    """Writes one run to a tracker. Every method may block, and raises the errors of the tracker's library."""

    def written(self) -> dict[str, set[int]]:
        """The steps that the tracker has stored, by the name of the value."""

    def write(self, rows: Sequence[StepRow]) -> None:
        """Write values that the tracker lacks."""

    def close(self, outcome: Outcome) -> None:
        """Close the run. Returns when the tracker has stored all values. An unfinished run may be opened again."""


def _unchanged(name: str) -> str:
    return name


@dataclass(frozen=True)
class Tracker:
    """A tracker. name: its name in settings, and of its extra. library: the module that it imports.

    open: creates a run, or opens the run with this id that an earlier process wrote; local data goes to the folder.
    legal: converts the name of a value to a name that the tracker accepts.
    """

    name: str
    library: str
    open: Callable[[TrackedRun, Path], Writer]
    legal: Callable[[str], str] = _unchanged

    def check(self) -> None:
        """Raise UserError if the library is not installed."""
        if find_spec(self.library) is None:
            fix = f"pip install 'tinkerflow[{self.name}]'"
            raise UserError(f"tracker {self.name!r}: its library {self.library} is not installed; {fix}")
