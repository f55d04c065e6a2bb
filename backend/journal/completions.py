"""The order in which a sampler's requests were answered, for clients that follow it with one cursor (retrieve_futures).

Every transaction that answers requests of a sampler takes the sampler's next number, and its requests carry it. The
number is taken by an UPDATE of the sampler's row, whose lock is held until the commit. So a number becomes visible
only after all smaller ones: a reader that has seen number n has missed nothing at or below n, on Postgres too, where
ids from a sequence would become visible out of order. A transaction that rolls back gives its number back. A number
without requests (an outcome that came second) does no harm. The cursor is such a number, so it means the same to every
API process, and after a restart.

Lock order as everywhere in the journal: samplers before requests.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.kinds import RequestState
from tinkerflow.backend.journal.statements import CLONE_BLOCK, get_owned, in_chunks, is_owned, missing
from tinkerflow.backend.journal.tables import Request, Sampler
from tinkerflow.backend.journal.views import Completion, Completions

PAGE = 1000

NEXT = {"last_completion": col(Sampler.last_completion) + 1}

_TAKE = sa.update(Sampler).where(col(Sampler.id) == sa.bindparam("of_sampler")).values(NEXT)
_TAKE_ONE = _TAKE.returning(col(Sampler.last_completion))
_JOIN = (
    sa.update(Sampler).where(is_owned(Sampler)).values(clones=col(Sampler.clones) + 1).returning(col(Sampler.clones))
)
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
_LAST = sa.select(col(Sampler.id), col(Sampler.last_completion)).where(
    col(Sampler.id).in_(sa.bindparam("ids", expanding=True))
)
_NO_LIMIT = 2**62


def take_numbers(connection: sa.Connection, sampler_ids: Iterable[str]) -> None:
    """Take the next number of each of these samplers for this transaction. One UPDATE each, in order of id."""
    rows = [{"of_sampler": sampler_id} for sampler_id in sorted(set(sampler_ids))]
    if rows:
        connection.execute(_TAKE, rows)


def take_number(connection: sa.Connection, sampler_id: str) -> int:
    """Take the next number of one sampler, and say which it is."""
    return connection.execute(_TAKE_ONE, {"of_sampler": sampler_id}).scalar_one()


def completions(connection: sa.Connection, sampler_id: str, owner: str | None, clone: int, after: int) -> Completions:
    """What was answered of one clone's requests after the cursor `after`, oldest first, about PAGE at once.

    One statement when nothing was answered since, two otherwise; three for a transaction that answered more than PAGE.
    A cursor that this sampler never gave (it is ahead) begins from the start, rather than wait for what has happened.
    """
    last = get_owned(connection, Sampler, sampler_id, owner).last_completion
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
    rows = connection.execute(_AFTER, {**bounds, "at_most": PAGE + 1}).all()
    if len(rows) > PAGE:
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


def last_numbers(connection: sa.Connection, sampler_ids: Collection[str]) -> dict[str, int]:
    """The last number of each sampler. One statement per ten thousand."""
    found: dict[str, int] = {}
    for ids in in_chunks(sampler_ids):
        for row in connection.execute(_LAST, {"ids": ids}):
            found[row.id] = row.last_completion
    return found


def join(connection: sa.Connection, sampler_id: str, owner: str | None) -> int:
    """A number from 1 for a copy of the sampler's client, never given before. One statement."""
    clone = connection.execute(_JOIN, {"row_id": sampler_id, "as_owner": owner}).scalar()
    if clone is None:
        raise missing(Sampler, sampler_id)
    return int(clone)


def acknowledge(
    connection: sa.Connection,
    sampler_id: str,
    owner: str | None,
    clone: int,
    request_ids: Collection[str],
    now: datetime,
) -> int:
    """Drop the bytes of results that their client says it has; how many. Ids that are not the clone's are passed over.

    A client acknowledges what it has downloaded and read, and only that; a result that nobody ever read stays, whatever
    is said of it. Only the clone that asked for a sample knows its id, so there is no other reader to wait for.
    """
    get_owned(connection, Sampler, sampler_id, owner)
    dropped = 0
    for ids in in_chunks(request_ids):
        statement = (
            sa.update(Request)
            .where(
                col(Request.id).in_(ids),
                col(Request.sampler_id) == sampler_id,
                col(Request.seq_id) >= clone * CLONE_BLOCK,
                col(Request.seq_id) < (clone + 1) * CLONE_BLOCK,
                col(Request.read_at).is_not(None),
                col(Request.dropped_at).is_(None),
            )
            .values(
                dropped_at=now,
                payload=b"",
                result=None,
                state=RequestState.FAILED,
                error=sa.case((col(Request.state) == RequestState.DONE, _ACKNOWLEDGED), else_=col(Request.error)),
                category=sa.case((col(Request.state) == RequestState.DONE, "user"), else_=col(Request.category)),
            )
        )
        dropped += connection.execute(statement).rowcount
    return dropped


_ACKNOWLEDGED = "the result was dropped: its client acknowledged that it has it"
