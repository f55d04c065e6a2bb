"""What sampling records for stable_reinforce, by sequence id. It is its session's, and goes a day after its use."""

from __future__ import annotations

from collections.abc import Collection
from datetime import datetime, timedelta

import numpy as np
import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.commands import StabilityInfo
from tinkerflow.backend.errors import NotFoundError
from tinkerflow.backend.journal.records import SequencesRecorded
from tinkerflow.backend.journal.statements import insert_if_absent
from tinkerflow.backend.journal.tables import StabilityRow

KEPT = timedelta(days=1)  # after the last use: the public documentation's ("StableReinforce")


def record(connection: sa.Connection, effect: SequencesRecorded, now: datetime) -> None:
    """Keep what was recorded of a session's sequences, and drop what nobody used for a day."""
    connection.execute(sa.delete(StabilityRow).where(col(StabilityRow.used_at) < now - KEPT))
    for info in effect.sequences:
        row = {
            "sequence_id": info.sequence_id,
            "session_id": effect.session_id,
            "used_at": now,
            "tokens": info.tokens_T.astype("<i4", copy=False).tobytes(),
            "logprobs": info.logprobs_T.astype("<f4", copy=False).tobytes(),
        }
        insert_if_absent(connection, StabilityRow, row)


def find(
    connection: sa.Connection, session_id: str, sequence_ids: Collection[str], now: datetime
) -> dict[str, StabilityInfo]:
    """What was recorded of these sequences of the session, by id; their day begins anew.

    NotFoundError names one that is unknown, another session's, or too old: these look alike.
    """
    here = (
        col(StabilityRow.sequence_id).in_(sequence_ids),
        col(StabilityRow.session_id) == session_id,
        col(StabilityRow.used_at) >= now - KEPT,
    )
    rows = connection.execute(
        sa.update(StabilityRow)
        .where(*here)
        .values(used_at=now)
        .returning(col(StabilityRow.sequence_id), col(StabilityRow.tokens), col(StabilityRow.logprobs))
    )
    found = {
        row.sequence_id: StabilityInfo(
            row.sequence_id, np.frombuffer(row.tokens, "<i4"), np.frombuffer(row.logprobs, "<f4")
        )
        for row in rows
    }
    if absent := sorted(set(sequence_ids) - found.keys()):
        raise NotFoundError(
            f"sequence_id {absent[0]!r}: nothing is recorded of it in this session. Sample with record_stability_info "
            "true, and train within a day"
        )
    return found
