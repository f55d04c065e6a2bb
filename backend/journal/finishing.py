"""Answers: the first one wins, and it comes with its row changes in one transaction.

Lock order everywhere in the journal: sessions, models, samplers, then requests, each by id.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal import completions, usage
from tinkerflow.backend.journal.effects import apply, end_models
from tinkerflow.backend.journal.kinds import ModelState, RequestState
from tinkerflow.backend.journal.records import Outcome, Used
from tinkerflow.backend.journal.statements import COMPLETION, IS_PENDING, answered, done
from tinkerflow.backend.journal.tables import Model, Request

_ANSWER = (
    sa.update(Request)
    .where(col(Request.id) == sa.bindparam("request_id"))
    .values(
        state=sa.bindparam("to_state"),
        result=sa.bindparam("to_result"),
        result_type=sa.bindparam("to_result_type"),
        error=sa.bindparam("to_error"),
        category=sa.bindparam("to_category"),
        started_at=sa.bindparam("to_started_at"),
        finished_at=sa.bindparam("now"),
        replays=sa.bindparam("to_replays"),
        completion=COMPLETION,
    )
)
_REPLAYS = sa.update(Request).where(col(Request.id).in_(sa.bindparam("ids", expanding=True))).values(replays=True)
_PASSED = sa.bindparam("passed_seq", type_=sa.BigInteger)
_ADVANCE = (
    sa.update(Model)
    .where(col(Model.id) == sa.bindparam("of_model"))
    .values(next_seq=sa.case((col(Model.next_seq) < _PASSED, _PASSED), else_=col(Model.next_seq)))
)
_LOCK_WAITING = (
    sa.select(col(Request.id), col(Request.sampler_id))
    .where(col(Request.id).in_(sa.bindparam("ids", expanding=True)), IS_PENDING)
    .order_by(col(Request.id))
    .with_for_update()
)


def finish(connection: sa.Connection, outcomes: Sequence[Outcome], now: datetime) -> tuple[list[str], list[str]]:
    """Answer requests; (ids answered by this call, the bell's topics).

    Three statements, one more for each sampler, and those of the effects.
    """
    first = {outcome.request_id: outcome for outcome in reversed(outcomes)}
    _advance(connection, outcomes)
    completions.take_numbers(connection, (one.sampler_id for one in outcomes if one.sampler_id is not None))
    waiting = {row.id: row.sampler_id for row in connection.execute(_LOCK_WAITING, {"ids": list(first)})}
    winners = [outcome for request_id, outcome in reversed(first.items()) if request_id in waiting]
    beaten = [outcome.request_id for outcome in first.values() if outcome.replays and outcome.request_id not in waiting]
    if beaten:
        connection.execute(_REPLAYS, {"ids": beaten})
    for outcome in winners:
        if outcome.sampler_id != waiting[outcome.request_id]:
            # It would get a number that clients have passed already, and they would never hear of it.
            raise ValueError(
                f"outcome of {outcome.request_id}: sampler_id is {outcome.sampler_id!r}: not the request's"
            )
    if not winners:
        return [], []
    connection.execute(
        _ANSWER,
        [
            {
                "request_id": outcome.request_id,
                "to_state": RequestState.DONE if outcome.error is None else RequestState.FAILED,
                "to_result": outcome.result,
                "to_result_type": outcome.result_type,
                "to_error": outcome.error,
                "to_category": outcome.category,
                "to_started_at": outcome.started_at,
                "to_replays": outcome.replays,
                "now": now,
            }
            for outcome in winners
        ],
    )
    ids = [outcome.request_id for outcome in winners]
    topics = done(ids)
    topics += {answered(one.sampler_id, one.seq_id): None for one in winners if one.sampler_id is not None}
    for outcome in winners:
        for effect in outcome.effects:
            topics += apply(connection, effect, now)
        if outcome.error is not None and outcome.model_id is not None and outcome.seq_id == 0:
            topics += end_models(connection, [outcome.model_id], ModelState.FAILED, outcome.error, now)
    usage.add(connection, [one for outcome in winners for one in outcome.effects if isinstance(one, Used)], now)
    return ids, topics


def _advance(connection: sa.Connection, outcomes: Sequence[Outcome]) -> None:
    """Move next_seq of every model past what was executed. Also locks the models, before any request."""
    after: dict[str, int] = {}
    for outcome in outcomes:
        if outcome.model_id is not None:
            passed = 0 if outcome.seq_id is None else outcome.seq_id + 1
            after[outcome.model_id] = max(passed, after.get(outcome.model_id, 0))
    if after:
        rows = [{"of_model": model_id, "passed_seq": passed} for model_id, passed in sorted(after.items())]
        connection.execute(_ADVANCE, rows)
