"""The artifacts of a training run's page, drawn from the journal, so they show the complete run even after restarts."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from uuid import UUID

from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.journal import Curve, Journal
from tinkerflow.backend.journal.checkpoints import CheckpointView
from tinkerflow.backend.journal.curves import StepFigures
from tinkerflow.backend.spec.outliers import BlamedRow, markdown_table, remedy
from tinkerflow.backend.store import Store
from tinkerflow.tasks.pipelines.curves import data_url, picture

DRAW_SECONDS = 60.0  # seconds between two drawings
DRAW_SHARE = 200  # the pause after a drawing is at least this many times as long as the drawing
MOST_POINTS = 150  # points of a curve, which is about 350 pixels wide in the picture
MOST_CHECKPOINTS = 50  # newest checkpoints on the page
_CURVES = ("loss", "grad_norm", "learning_rate", "kl", "tokens_per_second")

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Shown:
    """The content of one artifact. kind: Prefect's type, `image` or `markdown`."""

    name: str
    kind: str
    title: str
    data: str


class Drawing:
    """Draws the artifacts of one run from the journal."""

    def __init__(self, journal: Journal, run_id: str, about: str, console: str, store: Store | None = None) -> None:
        """about: the run in one line. console: URL of the run's page in our console. store: of histories, if any."""
        self._journal, self._run_id, self._about, self._console = journal, run_id, about, console
        self._store = store
        self.pause = DRAW_SECONDS  # seconds until the next drawing

    def note_flow_run(self, flow_run: UUID) -> None:
        """Store the id of the flow run with the artifacts. Call this in a thread."""
        self._journal.models.note_flow_run(self._run_id, str(flow_run))

    def key(self, shown: Shown) -> str:
        """Prefect's key of an artifact, which consists of lower-case letters, digits and dashes."""
        return re.sub("[^a-z0-9]+", "-", f"{self._run_id}-{shown.name}".lower())

    def draw(self) -> list[Shown]:
        """Draw the current artifacts. Call this in a thread, since it reads the journal."""
        began = perf_counter()
        curve = self._journal.curves.of_run(self._run_id, None, most=MOST_POINTS)
        saved = self._journal.checkpoints.page(None, run_id=self._run_id, limit=MOST_CHECKPOINTS, offset=0)
        shown = [Shown("run", "markdown", self._about, _page(self._about, self._console, curve, saved.rows))]
        if curve.points:
            shown.append(Shown("curves", "image", "curves over steps", data_url(_curves(curve.points))))
        if examined := self._examined():
            shown.append(Shown("blame", "markdown", "rows of examined steps", _blame_page(self._run_id, examined)))
        self.pause = max(DRAW_SECONDS, DRAW_SHARE * (perf_counter() - began))
        return shown

    def _examined(self) -> Mapping[int, Sequence[BlamedRow]]:
        if self._store is None or not self._journal.models.get(self._run_id, None).history:
            return {}
        try:
            return self._store.histories.blames(self._run_id)
        except StoreError as error:  # the next drawing shows them
            log.info("the examined steps of run %s are not drawn: %s", self._run_id, error)
            return {}


def _blame_page(run_id: str, examined: Mapping[int, Sequence[BlamedRow]]) -> str:
    """The rows of examined steps as Markdown."""
    lines = []
    for step, rows in examined.items():
        fix = f"Train on without the first: `{remedy(run_id, step, rows[0])}`"
        lines += [f"## Step {step}", "", *markdown_table(rows), "", fix, ""]
    return "\n".join(lines)


def _curves(points: Sequence[StepFigures]) -> str:
    lines = {
        name: [(point.step, value) for point in points if (value := getattr(point, name)) is not None]
        for name in _CURVES
    }
    return picture({name.replace("_", " "): {name: line} for name, line in lines.items() if line})


def _page(about: str, console: str, curve: Curve, checkpoints: Sequence[CheckpointView]) -> str:
    """The run as Markdown, with its last step and its checkpoints."""
    lines = [f"# {about}", "", f"[Open it in the console]({console})", "", f"**{curve.steps}** optimizer steps."]
    if curve.points:
        last = curve.points[-1]
        figures = ((name.replace("_", " "), getattr(last, name)) for name in _CURVES)
        lines += ["", "| the last step | |", "|---|---|"]
        lines += [f"| {name} | {value:.4g} |" for name, value in figures if value is not None]
    if checkpoints:
        lines += ["", "| step | kind | checkpoint | MiB | saved |", "|---|---|---|---|---|"]
        for one in checkpoints:
            size, saved = f"{one.size_bytes / 2**20:.1f}", f"{one.created_at:%Y-%m-%d %H:%M}"
            lines.append(f"| {one.step} | {one.kind} | `{one.path}` | {size} | {saved} |")
    return "\n".join(lines)
