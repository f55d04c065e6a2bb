"""Custom losses, and the sampling records that stable_reinforce needs. Both belong to a session.

The number of a custom loss in its session identifies it, so a repeated submit is recognized.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import orjson
import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import ConflictError, NotFoundError, UserError
from tinkerflow.backend.core.ids import custom_loss_id, new_id
from tinkerflow.backend.journal.database import JSON_BYTES, Aggregate, get_owned, in_chunks, insert_if_absent
from tinkerflow.backend.journal.quotas import NO_LIMITS, Limits, count_kept, text_bytes
from tinkerflow.backend.journal.tables import (
    CustomLossRow,
    Request,
    RequestState,
    Session,
    SessionState,
    StabilityRow,
    session_over,
)
from tinkerflow.backend.spec.commands import StabilityInfo
from tinkerflow.backend.spec.history import Kind
from tinkerflow.backend.spec.supports import Supports

_FAST = 1  # a zlib level
STABILITY_KEPT = timedelta(days=1)  # after the last use, as documented for StableReinforce


@dataclass(frozen=True)
class NewCustomLoss:
    """A loss that a client traced. Its id is `{session_id}:loss:{n}` (tinkerflow.backend.core.ids.custom_loss_id).

    definition: its checked inputs and graph, as JSON text. error: as in NewRequest.
    """

    session_id: str
    owner: str
    seq_id: int
    name: str
    definition: str
    content_hash: str
    error: str | None = None


@dataclass(frozen=True)
class SequencesRecorded:
    """Sampled sequences of a session that stable_reinforce may be trained on (record_stability_info)."""

    session_id: str
    sequences: tuple[StabilityInfo, ...]

    def apply(self, connection: sa.Connection, now: datetime) -> Sequence[str]:
        """Store the records, and delete records that have not been used for a day."""
        connection.execute(sa.delete(StabilityRow).where(col(StabilityRow.used_at) < now - STABILITY_KEPT))
        for info in self.sequences:
            row = {
                "sequence_id": info.sequence_id,
                "session_id": self.session_id,
                "used_at": now,
                "tokens": info.tokens_T.astype("<i4", copy=False).tobytes(),
                "logprobs": info.logprobs_T.astype("<f4", copy=False).tobytes(),
            }
            if info.routes_Tn is not None:
                routes = zlib.compress(info.routes_Tn.astype("<i2", copy=False).tobytes(), _FAST)
                row |= {"routes": routes, "base_model": info.base_model}
            if info.supports is not None:
                row |= {"supports": _packed(info.supports), "base_model": info.base_model}
            insert_if_absent(connection, StabilityRow, row)
        return ()


class CustomLosses(Aggregate):
    """Custom losses, and the records of stable_reinforce."""

    def submit(self, loss: NewCustomLoss, limits: Limits = NO_LIMITS) -> str:
        """Store a custom loss and its answered request. Returns the request's id; for a replay, the first request's id.

        NotFoundError: unknown or foreign session. ConflictError: the number was used for other content. UserError: the
        project has reached its limit. A loss with an error, or in a session that has ended, is stored as a failed
        request, because a refusal would hang the client.
        """
        loss_id, request_id, now = custom_loss_id(loss.session_id, loss.seq_id), new_id("req"), self._now()
        with self._write() as connection:
            session = get_owned(connection, Session, loss.session_id, loss.owner, lock="share")
            error = loss.error
            if error is None and len(loss.definition) > JSON_BYTES:
                error = f"the custom loss has {len(loss.definition)} characters as JSON: must have at most {JSON_BYTES}"
            if session.state != SessionState.ACTIVE:
                error, _ = session_over(session.id, session.state, session.detail)
            definition = loss.definition if error is None else None
            row = {
                "id": loss_id,
                "session_id": loss.session_id,
                "owner": loss.owner,
                "seq_id": loss.seq_id,
                "request_id": request_id,
                "name": loss.name,
                "definition": definition,
                "created_at": now,
            }
            if not insert_if_absent(connection, CustomLossRow, row):
                return _replayed(connection, loss_id, loss)
            count_kept(connection, loss.owner, "custom_losses", text_bytes(loss.name, definition), limits)
            done = orjson.dumps({"type": "create_custom_loss", "loss_id": loss_id})
            connection.execute(
                sa.insert(Request).values(
                    id=request_id,
                    kind=Kind.CREATE_CUSTOM_LOSS,
                    owner=loss.owner,
                    session_id=loss.session_id,
                    content_hash=loss.content_hash,
                    payload=b"",  # the definition is stored instead
                    state=RequestState.DONE if error is None else RequestState.FAILED,
                    result=done if error is None else None,
                    result_type="json",
                    error=error,
                    category=None if error is None else UserError.category,
                    waiting_tokens=0,
                    created_at=now,
                    finished_at=now,
                )
            )
        return request_id

    def definition(self, loss_id: str, session_id: str) -> str:
        """The definition (JSON) of a session's loss. NotFoundError: the session has no such loss."""
        of_session = (col(CustomLossRow.id) == loss_id, col(CustomLossRow.session_id) == session_id)
        with self._read() as connection:
            definition = connection.execute(sa.select(col(CustomLossRow.definition)).where(*of_session)).scalar()
        if definition is None:
            raise NotFoundError(f"loss_fn_config['loss_id'] {loss_id!r}: this session has no custom loss with that id")
        return definition

    def stability(
        self,
        session_id: str,
        sequence_ids: Collection[str],
        *,
        routes_of: str | None = None,
        supports_of: str | None = None,
    ) -> dict[str, StabilityInfo]:
        """The records of these sequences of the session, by id. Reading a record keeps it for another day.

        routes_of, supports_of: the base model for which routes and supports are returned; None: return none.
        NotFoundError: a sequence is unknown, too old, or belongs to another session.
        """
        now = self._now()
        usable = (
            col(StabilityRow.sequence_id).in_(sa.bindparam("ids", expanding=True)),
            col(StabilityRow.session_id) == session_id,
            col(StabilityRow.used_at) >= now - STABILITY_KEPT,
        )
        base_model = col(StabilityRow.base_model)
        columns = (
            *(col(StabilityRow.sequence_id), col(StabilityRow.tokens), col(StabilityRow.logprobs), base_model),
            sa.case((base_model == routes_of, col(StabilityRow.routes))).label("routes"),
            sa.case((base_model == supports_of, col(StabilityRow.supports))).label("supports"),
        )
        with self._write() as connection:
            used = sa.update(StabilityRow).where(*usable).values(used_at=now).returning(*columns)
            found = (row for ids in in_chunks(sequence_ids) for row in connection.execute(used, {"ids": ids}))
            infos = {row.sequence_id: _record(row) for row in found}
            if absent := sorted(set(sequence_ids) - infos.keys()):
                raise NotFoundError(
                    f"sequence_id {absent[0]!r}: this session has no record of it. Sample with "
                    "record_stability_info true, and train within a day"
                )
        return infos


def _record(row: sa.Row[Any]) -> StabilityInfo:
    tokens_T, logprobs_T = np.frombuffer(row.tokens, "<i4"), np.frombuffer(row.logprobs, "<f4")
    routes_Tn = supports = None
    if row.routes is not None:
        routes_Tn = np.frombuffer(zlib.decompress(row.routes), "<i2").reshape(len(tokens_T), -1)
    if row.supports is not None:
        supports = _unpacked(row.supports, len(tokens_T))
    return StabilityInfo(row.sequence_id, tokens_T, logprobs_T, routes_Tn, row.base_model or "", supports)


def _packed(supports: Supports) -> bytes:
    arrays = (supports.counts_N, supports.log_mass_N.view(np.int32), supports.tokens_M)
    return zlib.compress(np.concatenate(arrays).astype("<i4", copy=False).tobytes(), _FAST)


def _unpacked(packed: bytes, length: int) -> Supports:
    numbers = np.frombuffer(zlib.decompress(packed), "<i4")
    return Supports(numbers[:length], numbers[2 * length :], numbers[length : 2 * length].view("<f4"))


def _replayed(connection: sa.Connection, loss_id: str, loss: NewCustomLoss) -> str:
    stored = connection.execute(
        sa.select(col(Request.id), col(Request.content_hash))
        .join(CustomLossRow, col(CustomLossRow.request_id) == col(Request.id))
        .where(col(CustomLossRow.id) == loss_id)
    ).one()
    if stored.content_hash != loss.content_hash:
        raise ConflictError(
            f"custom_loss_seq_id {loss.seq_id} of session {loss.session_id} was used before for another loss; "
            "a repeated request must have the same content"
        )
    return str(stored.id)
