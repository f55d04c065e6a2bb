"""Results after they were read, and the order in which a sampler's requests were answered.

A client may follow a whole sampler with one cursor (retrieve_futures). Every transaction that answers requests of a
sampler takes the sampler's next number, and its requests carry it. The number is taken by an UPDATE of the sampler's
row, whose lock is held until the commit. So a number becomes visible only after all smaller ones: a reader that has
seen number n has missed nothing at or below n, on Postgres too, where ids from a sequence would become visible out of
order. A transaction that rolls back gives its number back. A number without requests (an outcome that came second)
does no harm. The cursor is such a number, so it means the same to every API process, and after a restart.

Results stay readable until they expire or are acknowledged. Then their bytes go, and the id answers with that fact.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate, get_owned, in_chunks
from tinkerflow.backend.journal.samplers import CLONE_BLOCK
from tinkerflow.backend.journal.tables import Request, RequestState, SamplerRow

PAGE = 1000
_ACKNOWLEDGED = "the result was dropped: its client acknowledged that it has it"
_AFTER = (
    sa.select(
        col(Request.id),
        col(Request.completion),
        col(Request.state),
        sa.func.length(col(Request.result)).label("size"),
    )
    .where(
        col(Request.sampler_id) == sa.bindparam("of_sampler"),
        col(Request.completion) > sa.bindparam("after"),
        col(Request.completion) <= sa.bindparam("up_to"),
        col(Request.seq_id) >= sa.bindparam("first_seq"),
        col(Request.seq_id) < sa.bindparam("end_seq"),
    )
    .order_by(col(Request.completion), col(Request.id))
    .limit(sa.bindparam("at_most"))
)
_LAST = sa.select(col(SamplerRow.id), col(SamplerRow.last_completion)).where(
    col(SamplerRow.id).in_(sa.bindparam("ids", expanding=True))
)
_NO_LIMIT = 2**62


@dataclass(frozen=True)
class Completion:
    """One answered request of a sampler; size: of its result in bytes, 0 when it failed or was dropped."""

    request_id: str
    done: bool
    size: int


@dataclass(frozen=True)
class Completions:
    """What was answered after one cursor, oldest first, and the next cursor."""

    rows: tuple[Completion, ...]
    cursor: int


class Results(Aggregate):
    """Answers by sampler, and the end of results that were read."""

    def completions(
        self, sampler_id: str, owner: str | None, *, clone: int, after: int, page: int = PAGE
    ) -> Completions:
        """What was answered of one clone's requests after the cursor `after`, oldest first, about `page` at once.

        One statement when nothing was answered since, two otherwise; three for a transaction that answered more than
        `page`. A cursor that this sampler never gave (it is ahead) begins from the start, rather than wait for what has
        happened. NotFoundError: a `sampler_id` that is unknown, or not the owner's.
        """
        with self._read() as connection:
            last = get_owned(connection, SamplerRow, sampler_id, owner).last_completion
            if after == last:
                return Completions((), last)
            bounds = {
                "of_sampler": sampler_id,
                "first_seq": clone * CLONE_BLOCK,
                "end_seq": (clone + 1) * CLONE_BLOCK,
                "after": after if after < last else 0,
                # What is answered from now on is for the next call: the cursor must not overtake what is given here.
                "up_to": last,
            }
            rows = connection.execute(_AFTER, {**bounds, "at_most": page + 1}).all()
            if len(rows) > page:
                # A number is given whole or not at all: leave out the one that the page cuts, or give it alone.
                last = rows[-1].completion
                rows = [row for row in rows if row.completion < last]
                if rows:
                    last = rows[-1].completion
                else:
                    alone = {**bounds, "after": last - 1, "up_to": last, "at_most": _NO_LIMIT}
                    rows = list(connection.execute(_AFTER, alone).all())
        return Completions(
            tuple(Completion(row.id, row.state == RequestState.DONE, row.size if row.size else 0) for row in rows), last
        )

    def last_completions(self, sampler_ids: Collection[str]) -> dict[str, int]:
        """The number of each sampler's last answer, to compare a cursor with. One statement per ten thousand."""
        with self._read() as connection:
            rows = (row for ids in in_chunks(sampler_ids) for row in connection.execute(_LAST, {"ids": ids}))
            return {row.id: row.last_completion for row in rows}

    def acknowledge(self, sampler_id: str, owner: str | None, request_ids: Collection[str], *, clone: int) -> int:
        """Drop the bytes of results that were read and that their client says it has; how many.

        A client acknowledges what it has downloaded and read, and only that. A result that nobody ever read stays, and
        ids that are not the clone's are passed over. Only the clone that asked for a sample knows its id, so there is
        no other reader to wait for. NotFoundError: unknown or foreign sampler.
        """
        dropped = 0
        with self._write() as connection:
            get_owned(connection, SamplerRow, sampler_id, owner)
            for ids in in_chunks(request_ids):
                statement = sa.update(Request).where(
                    col(Request.id).in_(ids),
                    col(Request.sampler_id) == sampler_id,
                    col(Request.seq_id) >= clone * CLONE_BLOCK,
                    col(Request.seq_id) < (clone + 1) * CLONE_BLOCK,
                    col(Request.read_at).is_not(None),
                    col(Request.dropped_at).is_(None),
                )
                values = _dropped(_ACKNOWLEDGED, payload=b"", dropped_at=self._now())
                dropped += connection.execute(statement.values(**values)).rowcount
        return dropped

    def expire(self, ttl: float, limit: int = 500) -> int:
        """Drop payload and result of at most `limit` requests read, or else answered, over `ttl` seconds ago; how many.

        Their ids answer with an error that says so. The payload of a request that may be replayed stays.
        """
        before = self._ago(ttl)
        last_use = sa.func.coalesce(col(Request.read_at), col(Request.finished_at))
        old = (
            sa.select(col(Request.id))
            .where(col(Request.dropped_at).is_(None), col(Request.finished_at) < before, last_use < before)
            .order_by(col(Request.finished_at))
            .limit(limit)
        )
        text = "the result expired: it was kept until " + before.isoformat(timespec="seconds") + " and is dropped now"
        payload = sa.case((col(Request.replays), col(Request.payload)), else_=b"")
        values = _dropped(text, payload=payload, dropped_at=self._now())
        with self._write() as connection:
            return connection.execute(sa.update(Request).where(col(Request.id).in_(old)).values(**values)).rowcount


def _dropped(text: str, **more: Any) -> dict[str, Any]:
    """The columns of a request whose result is dropped: one that was done answers with the error `text`."""
    was_done = col(Request.state) == RequestState.DONE
    return {
        "result": None,
        "state": RequestState.FAILED,
        "error": sa.case((was_done, text), else_=col(Request.error)),
        "category": sa.case((was_done, "user"), else_=col(Request.category)),
        **more,
    }
