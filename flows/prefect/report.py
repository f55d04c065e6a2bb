"""The content of a training run's page: lines of log, events, and artifacts that stay current.

Lines and events come from the outcomes of operations. Artifacts are drawn from the journal, so they show the complete
run, also after a restart of the engine.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter

from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.journal import (
    CheckpointSaved,
    Curve,
    Journal,
    LossMeasured,
    ModelLive,
    Outcome,
    StepMeasured,
    Trained,
)
from tinkerflow.backend.journal.checkpoints import CheckpointView
from tinkerflow.backend.journal.curves import StepFigures
from tinkerflow.backend.spec.outliers import BlamedRow, UsualNorms, markdown_table, remedy
from tinkerflow.backend.store import Store
from tinkerflow.tasks.pipelines.curves import data_url, picture

LINE_SECONDS = 1.0  # between two lines about steps
DRAW_SECONDS = 60.0  # between two drawings
DRAW_SHARE = 200  # the pause after a drawing is at least so many times as long as the drawing
MOST_POINTS = 150  # of a curve in the picture, where it is about 350 pixels wide
MOST_CHECKPOINTS = 50  # of the page, the newest
_CURVES = ("loss", "grad_norm", "learning_rate", "kl", "tokens_per_second")

log = logging.getLogger(__name__)

Say = Callable[[str, int], None]
Tell = Callable[..., None]


@dataclass(frozen=True)
class Shown:
    """The content of one artifact. kind: Prefect's type, `image` or `markdown`."""

    name: str
    kind: str
    title: str
    data: str


class RunReport:
    """Reports the outcomes of one run's operations."""

    def __init__(self, clock: Clock, say: Say, tell: Tell, trained: Trained, budget: int, most_drift: float) -> None:
        """Report a run from its current step on.

        clock: paces the lines. say: adds a line of a level to the run's logs. tell: emits an event with a payload.
        trained: the tokens that the run was trained on before. budget: of tokens, after which an event is emitted; 0
        for no budget. most_drift: see the setting; 0 for no limit.
        """
        self._clock, self._say, self._tell = clock, say, tell
        self._loss = self._weight = 0.0
        self._tokens = trained.begun
        self._trained, self._budget = trained.made - trained.last, budget
        self._spend(trained.last)  # counted again, as the engine may have ended before it reported the last step
        self._said_at = -math.inf
        self._said_step = 0
        self._unsaid = ""
        self._most_drift, self._drifts = most_drift, False
        self._finite = True  # whether the last loss was finite; several other losses in a row are one event
        self._norms = UsualNorms()

    def answered(self, outcome: Outcome) -> bool:
        """Report the outcome of an operation. Returns whether the artifacts are out of date now."""
        news = False
        for effect in outcome.effects:
            match effect:
                case LossMeasured():
                    self._loss += effect.loss
                    self._weight += effect.weight
                    self._tokens += effect.tokens
                    if self._finite and not math.isfinite(effect.loss):
                        self._say(f"the loss is {effect.loss}, not a finite number", logging.ERROR)
                        self._tell("tinkerflow.run.nan", loss=str(effect.loss))
                    self._finite = math.isfinite(effect.loss)
                    self._measure_drift(effect.kl)
                case ModelLive():  # a checkpoint has no gradients
                    self._loss = self._weight = 0.0
                    self._tokens = 0
                case StepMeasured():
                    self._spend(self._tokens)
                    self._compare_norm(effect)
                    self._step_made(effect)
                    news = True
                case CheckpointSaved():
                    size = f"{effect.size_bytes / 2**20:.1f} MiB"
                    self._say(f"step {effect.step}: saved {effect.path} ({effect.kind}, {size})", logging.INFO)
                    self._tell(
                        "tinkerflow.checkpoint.saved",
                        path=effect.path,
                        kind=effect.kind,
                        step=effect.step,
                        bytes=effect.size_bytes,
                    )
                    news = True
        return news

    def close(self) -> None:
        """Log the line that was held back."""
        if self._unsaid:
            self._say(self._unsaid, logging.INFO)
            self._unsaid = ""

    def _measure_drift(self, kl: float | None) -> None:
        """Report samples of another policy, once until one of the next is near enough. kl: None = not measured."""
        if kl is None or not self._most_drift:
            return
        if kl > self._most_drift and not self._drifts:
            cause = "the samples are of older weights or computed differently"
            self._say(f"kl_sample_train is {kl:.3g}, above {self._most_drift:g}: {cause}", logging.WARNING)
            self._tell("tinkerflow.run.drift", kl=kl, most=self._most_drift)
        self._drifts = kl > self._most_drift

    def _spend(self, tokens: int) -> None:
        """Count the tokens of a step, and emit an event for the step that reaches the budget."""
        before, self._trained = self._trained, self._trained + tokens
        if before < self._budget <= self._trained:
            self._say(f"trained on {self._trained:,} tokens: the budget of {self._budget:,} is spent", logging.WARNING)
            self._tell("tinkerflow.budget.reached", once=str(self._budget), tokens=self._trained, budget=self._budget)

    def _compare_norm(self, made: StepMeasured) -> None:
        """Report a gradient norm that is far above those of the steps before, or not finite."""
        usual = self._norms.median
        if self._norms.unusual(made.grad_norm):
            search = f"`tinkerflow blame {made.model_id} --step {made.step}` finds the rows if the run keeps a history"
            before = f", and the median of the steps before is {usual:.4g}" if math.isfinite(usual) else ""
            self._say(f"step {made.step}: the gradient norm is {made.grad_norm:.4g}{before}; {search}", logging.WARNING)
            self._tell("tinkerflow.run.outlier", once=str(made.step), step=made.step, grad_norm=str(made.grad_norm))
        self._norms.add(made.grad_norm)

    def _step_made(self, made: StepMeasured) -> None:
        loss = self._loss / self._weight if self._weight else self._loss
        figures = {"loss": loss, "gradient norm": made.grad_norm, "learning rate": made.learning_rate}
        text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
        first = min(self._said_step + 1, made.step)
        steps = f"step {made.step}" if first == made.step else f"steps {first} to {made.step}, the last one"
        self._unsaid = f"{steps}: {text}, {self._tokens:,} tokens"
        self._loss = self._weight = 0.0
        self._tokens = 0
        now = self._clock.monotonic()
        if now - self._said_at >= LINE_SECONDS:
            self.close()
            self._said_at, self._said_step = now, made.step


# ------------------------------------------------------------------ artifacts
class Drawing:
    """Draws the artifacts of one run from the journal."""

    def __init__(self, journal: Journal, run_id: str, about: str, console: str, store: Store | None = None) -> None:
        """about: the run in a line. console: the URL of the run's page in our console. store: of histories, if any."""
        self._journal, self._run_id, self._about, self._console = journal, run_id, about, console
        self._store = store
        self.pause = DRAW_SECONDS  # until the next drawing

    def key(self, shown: Shown) -> str:
        """Prefect's key of an artifact, which consists of small letters, digits and dashes."""
        return re.sub("[^a-z0-9]+", "-", f"{self._run_id}-{shown.name}".lower())

    def draw(self) -> list[Shown]:
        """The artifacts as they are now. Call this in a thread, since it reads the journal."""
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
