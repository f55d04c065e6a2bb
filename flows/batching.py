"""What belongs together: pending requests of one model in, batches out. Pure functions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tinkerflow.backend.journal import Kind, Pending

_IN_CHUNKS = (Kind.FORWARD, Kind.FORWARD_BACKWARD)  # the SDK cuts one call into several requests (PROTOCOL.md 3.3)


@dataclass(frozen=True)
class Batch:
    """Requests of one kind that make up one operation for people; `step`: the optimizer step it belongs to, from 1."""

    kind: Kind
    requests: tuple[Pending, ...]
    step: int

    @property
    def ends_step(self) -> bool:
        """Whether a step ends with it, so that a shared task run may end here too."""
        return self.kind not in _IN_CHUNKS


def batches(pending: Sequence[Pending], steps_made: int) -> list[Batch]:
    """The batches that `pending` (in order) falls into; `steps_made`: optimizer steps before the first of them.

    Neighbouring chunks of forward or of forward_backward are one batch; everything else is a batch by itself.
    """
    found: list[Batch] = []
    for request in pending:
        last = found[-1] if found else None
        if last is not None and request.kind in _IN_CHUNKS and request.kind == last.kind:
            found[-1] = Batch(last.kind, (*last.requests, request), last.step)
        else:
            found.append(Batch(request.kind, (request,), steps_made + 1))
        if request.kind == Kind.OPTIM_STEP:
            steps_made += 1
    return found


def short_name(model_id: str) -> str:
    """`model-ab12-0` for `sess-…ab12:train:0`: the end of the session's id, and the model's number in it."""
    session, _, number = model_id.partition(":train:")
    return f"model-{session[-4:]}-{number}"


def run_name(model_id: str, batch: Batch) -> str:
    """The name of a batch's task run: `model-ab12-0/step-000017/forward_backward`."""
    kind = {Kind.SAVE_FOR_SAMPLER: "save_weights_for_sampler"}.get(batch.kind, batch.kind.value)
    return f"{short_name(model_id)}/step-{batch.step:06d}/{kind}"


def shared_name(model_id: str, first_step: int, last_step: int | None = None) -> str:
    """The name of a task run that many batches share; while it is open, its last step is not known."""
    end = "onwards" if last_step is None else f"{last_step:06d}"
    return f"{short_name(model_id)}/steps-{first_step:06d}-{end}"
