"""Reads the history of a training run, to execute it again or to find the step that changed it.

Clients that examine the rows of a step (`tinkerflow blame`) send the worst rows, which the run's page shows.
"""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field

from tinkerflow.api.call import Authorized, Call, Router
from tinkerflow.api.checkpoints import CHECKPOINT
from tinkerflow.api.endpoints.targets import champions_of
from tinkerflow.api.openapi import takes
from tinkerflow.api.schemas import Strict, Wire
from tinkerflow.backend.catalog.card import saved_by
from tinkerflow.backend.catalog.history import past_requests
from tinkerflow.backend.catalog.receipt import make_receipt
from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal import CheckpointKind, ModelView
from tinkerflow.backend.spec.checkpoint import CheckpointPath
from tinkerflow.backend.spec.history import PastRequest, digest
from tinkerflow.backend.spec.outliers import MOST_REPEATED, MOST_ROWS, MOST_TOKENS, BlamedRow, Reason

router = Router(busy=1)

_MOST_REQUESTS = 500  # requests on a page
_MOST_BYTES = 2**23  # bytes of the payloads on a page; a larger request is on a page of its own
After = Annotated[int, Query(ge=-1, lt=2**63)]


class HistorySession(Wire):
    """The session of a run, as its client began it. project_id: its current label."""

    session_id: str
    tags: list[str]
    user_metadata: Mapping[str, Any]
    project_id: str | None
    display_name: str | None


class HistoryRun(Wire):
    """The run as it was created. seed: null for a run that started from a checkpoint."""

    training_run_id: str
    base_model: str
    lora_rank: int
    train_attn: bool
    train_mlp: bool
    train_unembed: bool
    optimizer: str
    seed: int | None
    user_metadata: Mapping[str, str]
    session: HistorySession


class CheckpointAnswers(Wire):
    """champions: when the checkpoint was promoted, by champion. number: how many sample requests it answered."""

    champions: dict[str, str]
    number: int
    first_at: datetime | None
    last_at: datetime | None


class HistoryRequest(Wire):
    """An answered request. step: the optimizer step that it made. payload: its body in base64, null if not requested.

    saves: the path of the named checkpoint that it saves, null if none. payload_hash, result_hash: SHA-256 (hex) of the
    body and of the result; result_hash is empty after a failure.
    """

    seq_id: int
    request_id: str
    kind: str
    step: int | None
    saves: str | None
    payload: str | None
    payload_hash: str
    result_hash: str
    error: str | None
    answered_at: datetime


class History(Wire):
    """A page of a history. next: the value of `after` for the next page, null at the end."""

    run: HistoryRun
    requests: list[HistoryRequest]
    next: int | None


Count = Annotated[int, Field(ge=0, lt=2**31)]
Figure = Annotated[float, Field(allow_inf_nan=False)]


class ExaminedRow(Strict):
    """A row of a step, computed alone (`spec.outliers.BlamedRow`). loss, grad_norm: null if they are not finite."""

    number: Count
    tokens: Count
    loss: Figure | None
    grad_norm: Figure | None
    worst: list[tuple[Count, Count, Figure]] = Field([], max_length=MOST_TOKENS)
    repeated: list[Count] = Field([], max_length=MOST_REPEATED)
    surprise: Figure | None = None
    weight: Figure | None = None
    gap: Figure | None = None
    share: Figure = 0.0
    reason: Reason = ""
    score: Figure = 0.0

    def row(self) -> BlamedRow:
        """The row in the store's form."""
        values: dict[str, Any] = dict(self)
        return BlamedRow(**{**values, "worst": tuple(self.worst), "repeated": tuple(self.repeated)})


class ExaminedStep(Strict):
    """The worst rows of a step, the worst first."""

    step: int = Field(ge=1, lt=2**31)
    rows: list[ExaminedRow] = Field(min_length=1, max_length=MOST_ROWS)


@router.post("/training_runs/{run_id}/blames", openapi_extra=takes(ExaminedStep))
async def blames(run_id: str, call: Authorized) -> Wire:
    """Store the worst rows of a step of the project's own run, for the run's page. They replace earlier ones."""
    body = await call.parsed(ExaminedStep)
    await asyncio.to_thread(_keep_blame, call, run_id, body)
    return Wire()


@router.get("/training_runs/{run_id}/history")
async def history(run_id: str, call: Authorized, after: After = -1, payloads: bool = True) -> History:
    """The answered requests of a run in order, with a seq_id above `after`; without `payloads`, only their hashes.

    The setting `history` and the run's metadata determine whether a run has a history. Requests from the last minutes
    are included.
    """
    return await asyncio.to_thread(_page, call, run_id, after, payloads)


@router.get("/training_runs/{run_id}/receipt")
async def receipt(run_id: str, call: Authorized) -> dict[str, Any]:
    """A signed statement of all inputs and results of a run with a history, without its data (`tinkerflow verify`)."""
    return await asyncio.to_thread(_receipt, call, run_id)


@router.get(f"{CHECKPOINT}/answers")
async def answers(run_id: str, kind: CheckpointKind, name: str, call: Authorized) -> CheckpointAnswers:
    """The champion names of a checkpoint, and the number of the caller's sample requests that it answered."""
    return await asyncio.to_thread(_answers, call, str(CheckpointPath(run_id, kind, name)))


def _answers(call: Call, path: str) -> CheckpointAnswers:
    journal = call.journal
    journal.checkpoints.get(path, call.owner)
    given = journal.samples.answers_of(path, call.owner)
    champions = champions_of(call, path)
    return CheckpointAnswers(champions=champions, number=given.number, first_at=given.first, last_at=given.last)


def _keep_blame(call: Call, run_id: str, body: ExaminedStep) -> None:
    call.services.store.histories.write_blame(_run(call, run_id).id, body.step, [row.row() for row in body.rows])


def _receipt(call: Call, run_id: str) -> dict[str, Any]:
    return make_receipt(call.journal, call.services.store, _run(call, run_id).id, call.services.clock.now())


def _run(call: Call, run_id: str) -> ModelView:
    """The caller's run. NotFoundError if it has no history."""
    model = call.journal.models.get(run_id, call.owner)
    if not call.journal.histories.exists(run_id):
        rule = "must be created with `history: true`, in its metadata or in a pipeline's file"
        raise NotFoundError(f"run {run_id!r} has no history: {rule}")
    return model


def _page(call: Call, run_id: str, after: int, payloads: bool) -> History:
    journal, store = call.journal, call.services.store
    model = _run(call, run_id)
    session = journal.sessions.get(model.session_id, None)
    chosen: list[PastRequest] = []
    size, more = 0, False
    for past in past_requests(journal, store, run_id, after=after):
        size += len(past.payload)
        if more := len(chosen) == _MOST_REQUESTS or bool(chosen and size > _MOST_BYTES):
            break
        chosen.append(past)
    steps = journal.histories.steps(run_id, chosen[0].seq_id, chosen[-1].seq_id) if chosen else {}
    return History(
        run=HistoryRun.of(
            model,
            training_run_id=model.id,
            lora_rank=model.rank,
            session=HistorySession.of(session, session_id=session.id),
        ),
        requests=[_request(run_id, past, steps.get(past.seq_id), payloads) for past in chosen],
        next=chosen[-1].seq_id if more else None,
    )


def _request(run_id: str, past: PastRequest, step: int | None, with_payload: bool) -> HistoryRequest:
    return HistoryRequest.of(
        past,
        step=step,
        saves=saved_by(run_id, past.kind, past.payload),
        payload=base64.b64encode(past.payload).decode() if with_payload else None,
        payload_hash=digest(past.payload),
    )
