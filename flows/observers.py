"""How an engine's work is shown to people, and how people control it. `flows/prefect` is the only implementation.

A runner reports to its `RunObserver`s, which the `EngineObserver` creates. The dispatcher implements `RunControls`, so
that people can pause, cancel and retry runs. Only `flows/prefect` and the pipelines import Prefect.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Protocol
from uuid import UUID

from tinkerflow.backend.journal import Kind, Pending, Trained
from tinkerflow.tasks.execution.operation import Operation
from tinkerflow.tasks.execution.recheck import Difference
from tinkerflow.tasks.execution.restore import Restored

IN_CHUNKS = (Kind.FORWARD, Kind.FORWARD_BACKWARD)  # the SDK cuts one call into several requests


@dataclass(frozen=True)
class Batch:
    """Requests of one kind that people see as one operation. step: the optimizer step, counted from 1."""

    kind: Kind
    requests: tuple[Pending, ...]
    step: int

    @property
    def ends_step(self) -> bool:
        """Whether a step ends with this batch, so that a shared task run may end here too."""
        return self.kind not in IN_CHUNKS


class RunObserver(Protocol):
    """Shows one runner's work. Every method returns immediately."""

    @property
    def flow_run(self) -> UUID | None:
        """The flow run that shows the runner's work now."""

    def started(self, batch: Batch, operations: Sequence[Operation]) -> None:
        """The operations of a batch of one model were started."""

    def sampled(self, operation: Operation) -> None:
        """A sampling request was taken from the journal."""

    def paused(self, text: str | None) -> None:
        """The runner takes no more requests from the journal, for the reason `text`. None: it continues."""

    def restoring(self, generation: int) -> None:
        """The model is being restored in the worker group of this generation."""

    def restored(self, generation: int, restored: Restored) -> None:
        """The model was restored."""

    def differed(self, difference: Difference) -> None:
        """Operations were executed a second time, and a result differed."""

    def interrupted(self) -> None:
        """The worker group ended, which interrupted the operations in flight."""

    def log(self, text: str, level: int = ...) -> None:
        """Add a line to the run's logs."""

    def ended(self, state: str, text: str, *, over: bool = True) -> None:
        """The runner has ended: `Completed`, `Failed` or `Cancelled`. over: no other engine continues its run."""


class RunControls(Protocol):
    """How people control training runs."""

    def shown_in(self, model_id: str) -> UUID | None:
        """The flow run that shows the model now, or will show it when the model resumes."""

    async def pause(self, model_id: str, reason: str | None) -> None:
        """Stop executing the model's requests, and give its clients the reason. None: continue."""

    async def cancel(self, model_id: str, reason: str) -> None:
        """End the model now. Its waiting requests fail with the reason."""

    async def retry(self, model_id: str, flow_run: UUID) -> None:
        """Resume a model that no runner serves, in this flow run. UserError: the model cannot be resumed."""


class EngineObserver(Protocol):
    """Shows all runs of an engine."""

    @property
    def is_on(self) -> bool:
        """Whether runs are shown at all."""

    def observe_training_run(
        self,
        model_id: str,
        base_model: str,
        label: str,
        adopted: UUID | None,
        trained: Trained,
        steps: int,
        created_at: datetime,
    ) -> Sequence[RunObserver]:
        """The observers of one model's training run; none if nothing is shown.

        label: the client's name for the run. adopted: the flow run in which a retried run continues. trained, steps:
        the tokens and optimizer steps that the run was trained before. created_at: when the model was created.
        """

    def observe_sampling(self, base_model: str) -> Sequence[RunObserver]:
        """The observers of one base model's samples; none if nothing is shown."""

    def emit(self, event: str, name: str, of: str = "base-model", **payload: object) -> None:
        """Report an event, such as `tinkerflow.group.ended`, about the object `name` of the kind `of`."""

    async def watch(self, controls: RunControls) -> None:
        """Apply people's changes to the runs through `controls`, until cancelled."""


class Unobserved:
    """The `EngineObserver` of an engine that shows nothing."""

    is_on = False

    def observe_training_run(self, *_: object) -> Sequence[RunObserver]:
        return ()

    def observe_sampling(self, base_model: str) -> Sequence[RunObserver]:
        return ()

    def emit(self, event: str, name: str, of: str = "base-model", **payload: object) -> None:
        pass

    async def watch(self, controls: RunControls) -> None:
        pass
