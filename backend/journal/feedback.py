"""Feedback on samples, stored with a copy of the sample."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.errors import TooManyError
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.database import Aggregate, as_view
from tinkerflow.backend.journal.quotas import NO_LIMITS, Limits, count_kept, lock_project, rule_of, text_bytes
from tinkerflow.backend.journal.tables import FeedbackRow

_AT_ONCE = 8  # rows fetched from the database at a time
_MOST_CHARACTERS = 2**24  # characters of a page without its last row


@dataclass(frozen=True)
class NewFeedback:
    """Feedback on a sample from the key `key_id` of project `owner`: a reward, a label, a better text, or several.

    prompt: messages or a text. answer: the sample's text. tokens: int32. logprobs: float32.
    """

    owner: str
    key_id: str
    sample_id: str
    reward: float | None
    label: str | None
    text: str | None
    base_model: str
    model_path: str | None
    prompt: list[dict[str, str]] | str
    answer: str
    tokens: bytes
    logprobs: bytes


@dataclass(frozen=True)
class FeedbackView(NewFeedback):
    """Stored feedback. id: increases with time."""

    id: int
    at: datetime


class FeedbackGiven(Aggregate):
    """All feedback, oldest first."""

    def check(self, owner: str, limits: Limits) -> None:
        """TooManyError if the project has reached its limit for the last 24 hours."""
        if limits.feedback_per_day:
            with self._read() as connection:
                self._check(connection, owner, limits.feedback_per_day)

    def add(self, new: NewFeedback, limits: Limits = NO_LIMITS) -> int:
        """Store feedback and return its id. The audit log gets the key, not the text. TooManyError as in `check`."""
        now = self._now()
        with self._write() as connection:
            if limits.feedback_per_day:
                lock_project(connection, new.owner)
                self._check(connection, new.owner, limits.feedback_per_day)
            row = {**asdict(new), "at": now}
            texts = text_bytes(json.dumps(new.prompt), new.answer, new.text) + len(new.tokens) + len(new.logprobs)
            count_kept(connection, new.owner, "feedback", texts, limits)
            made = connection.execute(sa.insert(FeedbackRow).values(**row).returning(col(FeedbackRow.id))).scalar_one()
            details = {"sample_id": new.sample_id, "key_id": new.key_id}
            event = audit.AuditedEvent.FEEDBACK_GIVEN
            audit.write_event(
                connection,
                now,
                owner=new.owner,
                event=event,
                actor=audit.actor_of_key(new.key_id),
                tinker_path=new.model_path,
                details=details,
            )
        return int(made or 0)

    def page(
        self, owner: str, *, since: datetime | None = None, after: int = 0, limit: int = 100
    ) -> list[FeedbackView]:
        """A project's feedback after the id `after`, oldest first; `since`: only from that time on.

        At most `limit` rows, and fewer if they are long. An empty page is the end.
        """
        where = [col(FeedbackRow.owner) == owner, col(FeedbackRow.id) > after]
        if since is not None:
            where.append(col(FeedbackRow.at) >= since)
        statement = sa.select(FeedbackRow).where(*where).order_by(col(FeedbackRow.id)).limit(limit)
        found: list[FeedbackView] = []
        size = 0
        with (
            self._read() as connection,
            connection.execute(statement, execution_options={"yield_per": _AT_ONCE}) as rows,
        ):
            for row in rows:
                found.append(as_view(FeedbackView, row))
                size += len(str(row.prompt)) + len(row.answer) + len(row.text or "")
                if size > _MOST_CHARACTERS:
                    break
        return found

    def _check(self, connection: sa.Connection, owner: str, most: int) -> None:
        latest = sa.select(col(FeedbackRow.at)).where(col(FeedbackRow.owner) == owner)
        # Ids increase with time, and are indexed.
        oldest = connection.execute(latest.order_by(col(FeedbackRow.id).desc()).offset(most - 1).limit(1)).scalar()
        # A time in the future was written before the clock was corrected, and says nothing about the last day.
        if oldest is not None and timedelta(0) <= self._now() - oldest < timedelta(days=1):
            rule = rule_of("feedback_per_day")
            raise TooManyError(f"this project has rated {most} answers in 24 hours, its limit {rule}")
