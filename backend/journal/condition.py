"""The condition that the service is in, as the journal knows it: for `tinkerflow doctor`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.kinds import RequestState
from tinkerflow.backend.journal.recovery_tables import Process, Suspect
from tinkerflow.backend.journal.tables import BaseModelRow, Model, Request


@dataclass(frozen=True)
class Condition:
    """beats: when each part (`engine`, `api`) last said that it works; parts that were stopped in order are not in it.

    waits: why the requests of a base model or a model are not executed at present. suspects: pending requests that a
    worker group was executing when it ended.
    """

    beats: Mapping[str, datetime]
    waits: Mapping[str, str]
    suspects: int


def condition(connection: sa.Connection) -> Condition:
    """Read it."""
    engine_gone = sa.and_(col(Process.name) == "engine", col(Process.holder) == "")
    beats = connection.execute(sa.select(col(Process.name), col(Process.beat_at)).where(sa.not_(engine_gone)))
    of_bases = sa.select(col(BaseModelRow.name), col(BaseModelRow.progress))
    of_models = sa.select(col(Model.id), col(Model.progress))
    waits = connection.execute(
        sa.union_all(
            of_bases.where(col(BaseModelRow.progress).is_not(None)), of_models.where(col(Model.progress).is_not(None))
        )
    )
    suspects = connection.execute(
        sa.select(sa.func.count())
        .select_from(Suspect)
        .join(Request, col(Request.id) == col(Suspect.request_id))
        .where(col(Request.state) == RequestState.PENDING)
    )
    return Condition(
        {row.name: row.beat_at for row in beats},
        {name: str(text) for name, text in waits},
        int(suspects.scalar_one()),
    )
