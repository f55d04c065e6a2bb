"""Reports of a training run for people: lines about its steps, its saves and its alarms, and events for automations.

The reports derive from the outcomes of operations. The run's pages in Prefect (flows/prefect) and in the console
(run_log.py) show them.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable

from tinkerflow.backend.core.clock import Clock
from tinkerflow.backend.journal import CheckpointSaved, LossMeasured, ModelLive, Outcome, StepMeasured, Trained
from tinkerflow.backend.spec.drift import DRIFT_FIGURES, DriftLimits, UsualDrift
from tinkerflow.backend.spec.outliers import UsualSteps
from tinkerflow.tasks.execution.restore import Restored

LINE_SECONDS = 1.0  # seconds between two lines about steps
INTERRUPTED = "its worker group ended; the next one executes the operations in flight again"

Say = Callable[[str, int], None]
Tell = Callable[..., None]


class RunReport:
    """Reports the outcomes of one run's operations."""

    def __init__(
        self,
        clock: Clock,
        say: Say,
        tell: Tell,
        trained: Trained,
        budget: int,
        drift_limits: DriftLimits,
        *,
        says_steps: bool = True,
    ) -> None:
        """Report a run from its current step on.

        clock: paces the lines. say: adds a line of a level to the run's logs. tell: emits an event with a payload.
        trained: the tokens that the run was trained on before. budget: tokens after which an event is emitted; 0 for no
        budget. drift_limits: limits of `DRIFT_FIGURES`. says_steps: whether steps are also reported as lines.
        """
        self._says_steps = says_steps
        self._clock, self._say, self._tell = clock, say, tell
        self._loss = self._weight = 0.0
        self._tokens = trained.begun
        self._trained, self._budget = trained.made - trained.last, budget
        self._spend(trained.last)  # repeated, since the engine may have ended before this report
        self._said_at = -math.inf
        self._said_step = 0
        self._unsaid = ""
        self._drift_limits, self._drifts = drift_limits, set[str]()  # the second: figures with an alarm
        self._usual_drift = {figure.column: UsualDrift(figure) for figure in DRIFT_FIGURES}
        self._finite = True  # whether the last loss was finite; several non-finite losses in a row are one event
        self._usual = UsualSteps()

    def answered(self, outcome: Outcome) -> bool:
        """Report the outcome of an operation. Returns whether this makes the artifacts out of date."""
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
                    self._measure_drift(effect)
                case ModelLive():  # a checkpoint has no gradients
                    self._loss = self._weight = 0.0
                    self._tokens = 0
                case StepMeasured():
                    self._spend(self._tokens)
                    self._step_made(effect)
                    news = True
                case CheckpointSaved():
                    size = f"{effect.size_bytes / 1e6:.3g} MB"
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

    def _measure_drift(self, measured: LossMeasured) -> None:
        """Report samples of another policy, once until samples are of this policy again."""
        for figure in DRIFT_FIGURES:
            value: float | None = getattr(measured, figure.column)
            if value is None:
                continue
            alarm = self._usual_drift[figure.column].alarm(
                value, self._drift_limits, routed=measured.agreement is not None
            )
            if figure.is_wrong(value, self._drift_limits):
                alarm = figure.alarm(value, self._drift_limits)
            if not alarm:
                self._drifts.discard(figure.column)
            elif figure.column not in self._drifts:
                self._drifts.add(figure.column)
                self._say(alarm, logging.WARNING)
                bound = {"least" if figure.falls else "most": figure.limit(self._drift_limits)}
                self._tell(figure.event, **{figure.column: value}, **bound)

    def _spend(self, tokens: int) -> None:
        """Count the tokens of a step, and emit an event for the step that reaches the budget."""
        before, self._trained = self._trained, self._trained + tokens
        if before < self._budget <= self._trained:
            self._say(f"trained on {self._trained:,} tokens: the budget of {self._budget:,} is spent", logging.WARNING)
            self._tell("tinkerflow.budget.reached", once=str(self._budget), tokens=self._trained, budget=self._budget)

    def _compare(self, made: StepMeasured, loss: float | None) -> None:
        """Report a step that leaves the usual range of the run. loss: None if it has no mean."""
        known = math.nan if loss is None else loss
        if reason := self._usual.unusual(made.grad_norm, known):
            search = f"`tinkerflow blame {made.model_id} --step {made.step}` finds the rows if the run keeps a history"
            self._say(f"step {made.step}: {reason}; {search}", logging.WARNING)
            figures = {"grad_norm": str(made.grad_norm)} | ({} if loss is None else {"loss": str(loss)})
            self._tell("tinkerflow.run.outlier", once=str(made.step), step=made.step, **figures)
        self._usual.add(made.grad_norm, known)

    def _step_made(self, made: StepMeasured) -> None:
        if not self._tokens:
            reason = "no forward_backward has succeeded since the step before"
            self._say(f"step {made.step} has no gradients: {reason}; only momentum moved the weights", logging.WARNING)
        loss = self._loss / self._weight if self._weight else None
        self._compare(made, loss)
        figures = {"loss": loss, "gradient norm": made.grad_norm, "learning rate": made.learning_rate}
        text = ", ".join(f"{name} {value:.4g}" for name, value in figures.items() if value is not None)
        first = min(self._said_step + 1, made.step)
        steps = f"step {made.step}" if first == made.step else f"steps {first} to {made.step}, the last one"
        self._unsaid = f"{steps}: {text}, {self._tokens:,} tokens" if self._says_steps else ""
        self._loss = self._weight = 0.0
        self._tokens = 0
        now = self._clock.monotonic()
        if self._unsaid and now - self._said_at >= LINE_SECONDS:
            self.close()
            self._said_at, self._said_step = now, made.step


def restored_line(generation: int, restored: Restored) -> str:
    """A line about a model that was restored in the worker group of this generation."""
    source = "its creation" if restored.snapshot is None else f"its snapshot at request {restored.snapshot.seq_id}"
    text = f"restored in worker group {generation}: {restored.requests} requests replayed"
    return f"{text} ({restored.steps} optimizer steps) after {source}, in {round(restored.seconds, 3)} s"
