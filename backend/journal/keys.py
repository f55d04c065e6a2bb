"""API keys of 256 random bits, stored as SHA-256. A key has access only to the rows of its project.

The service's own secrets are also stored here. All its processes share them, and the first use creates them.
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.core.ids import KEY_PREFIX, LOCAL_OWNER, new_id
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.database import Aggregate, Table, as_view, columns, insert_if_absent, missing
from tinkerflow.backend.journal.project_limits import ProjectLimit, checked_name
from tinkerflow.backend.journal.quotas import move_totals
from tinkerflow.backend.journal.tables import ApiKey, EndedToken, ServiceSecret

_SHOWN = len(KEY_PREFIX) + 6
_USE_NOTED_EVERY = timedelta(minutes=1)  # so that most checks of a key only read

_WITH_LIMITS = (
    sa.select(ApiKey, col(ProjectLimit.limits))
    .outerjoin(ProjectLimit, col(ProjectLimit.project) == col(ApiKey.project))
    .where(col(ApiKey.revoked_at).is_(None))
)
_USABLE = _WITH_LIMITS.where(col(ApiKey.id) == sa.bindparam("key_id"))
_FIND = _WITH_LIMITS.where(col(ApiKey.key_hash) == sa.bindparam("hashed"))


@dataclass(frozen=True)
class KeyView:
    """An API key without its secret. prefix: its first characters, so that people recognize the key."""

    id: str
    prefix: str
    name: str
    project: str
    admin: bool
    created_at: datetime
    last_used_at: datetime | None
    revoked_at: datetime | None

    @property
    def owner(self) -> str:
        """The owner of the rows that this key reads and writes: its project."""
        return self.project


@dataclass(frozen=True)
class UsableKey(KeyView):
    """A key that is not revoked. limits: its project's own limits, or None."""

    limits: dict[str, int] | None


class Keys(Aggregate):
    """API keys, and the service's secrets."""

    def create(
        self, name: str, project: str, *, admin: bool = False, actor: str = audit.SERVICE
    ) -> tuple[KeyView, str]:
        """Create an API key. Returns its row, and its secret (`tml-...`), which is never shown again.

        Surrounding spaces are dropped. UserError: the name or the project is empty or too long.

        The project of the first key receives all rows that were created without a key.

        actor: for the audit log; see `audit.write_event`.
        """
        name, project = checked_name("name", name), checked_name("project", project)
        secret, now = KEY_PREFIX + secrets.token_urlsafe(32), self._now()
        values = {"id": new_id("key"), "key_hash": hash_key(secret), "prefix": secret[:_SHOWN], "created_at": now}
        made = sa.insert(ApiKey).values(**values, name=name, project=project, admin=admin).returning(*columns(ApiKey))
        with self._write() as connection:
            if connection.execute(sa.select(col(ApiKey.id)).limit(1)).first() is None and project != LOCAL_OWNER:
                _adopt_local_rows(connection, project)
            row = connection.execute(made).one()
            _write_event(connection, now, row, audit.AuditedEvent.PROJECT_KEY_CREATED, actor)
        return as_view(KeyView, row), secret

    def all(self) -> list[KeyView]:
        """All keys, including revoked keys, oldest first."""
        return self._views(KeyView, sa.select(ApiKey).order_by(col(ApiKey.created_at), col(ApiKey.id)))

    def revoke(self, key_id: str, *, actor: str = audit.SERVICE) -> KeyView:
        """Revoke a key. A key that is already revoked is left unchanged. NotFoundError: unknown id.

        actor: for the audit log; see `audit.write_event`.
        """
        now = self._now()
        with self._write() as connection:
            revoked = sa.update(ApiKey).where(col(ApiKey.id) == key_id, col(ApiKey.revoked_at).is_(None))
            row = connection.execute(revoked.values(revoked_at=now).returning(*columns(ApiKey))).one_or_none()
            if row is not None:
                _write_event(connection, now, row, audit.AuditedEvent.PROJECT_KEY_REVOKED, actor)
            else:
                row = connection.execute(sa.select(ApiKey).where(col(ApiKey.id) == key_id)).one_or_none()
        if row is None:
            raise missing(ApiKey, key_id)
        return as_view(KeyView, row)

    def verify(self, secret: str) -> UsableKey | None:
        """The key with this secret; None if it is unknown or revoked. Its use is recorded once a minute."""
        hashed = hash_key(secret)
        with self._read() as connection:
            row = connection.execute(_FIND, {"hashed": hashed}).one_or_none()
        # The lookup is by a hash that clients cannot choose. The comparison does not rely on the index.
        return self._used(row if row is not None and hmac.compare_digest(row.key_hash, hashed) else None)

    def usable(self, key_id: str) -> UsableKey | None:
        """The key with the id in a token; None if unknown or revoked. Its use is recorded once a minute."""
        with self._read() as connection:
            row = connection.execute(_USABLE, {"key_id": key_id}).one_or_none()
        return self._used(row)

    def end_token(self, token: str, expires_at: datetime) -> None:
        """Sign a token out in all processes. expires_at: the end of the token's life."""
        row = {"token_hash": hash_key(token), "expires_at": expires_at}
        with self._write() as connection:
            connection.execute(sa.delete(EndedToken).where(col(EndedToken.expires_at) < self._now()))
            insert_if_absent(connection, EndedToken, row)

    def is_ended(self, token: str) -> bool:
        """Whether this token was signed out."""
        ended = sa.select(sa.literal(1)).where(col(EndedToken.token_hash) == hash_key(token))
        with self._read() as connection:
            return connection.execute(ended).first() is not None

    def has_any(self) -> bool:
        """Whether a key was ever created. A server whose keys are all revoked still requires a key."""
        with self._read() as connection:
            return connection.execute(sa.select(col(ApiKey.id)).limit(1)).first() is not None

    def service_secret(self, name: str) -> bytes:
        """The 32 random bytes called `name`, the same for all processes. The first use creates them."""
        row = {"name": name, "value": secrets.token_bytes(32), "created_at": self._now()}
        with self._write() as connection:
            insert_if_absent(connection, ServiceSecret, row)
            of_name = sa.select(col(ServiceSecret.value)).where(col(ServiceSecret.name) == name)
            return connection.execute(of_name).scalar_one()

    def _used(self, row: sa.Row[Any] | None) -> UsableKey | None:
        if row is None:
            return None
        now = self._now()
        if row.last_used_at is None or now - row.last_used_at >= _USE_NOTED_EVERY:
            with self._write() as connection:
                connection.execute(sa.update(ApiKey).where(col(ApiKey.id) == row.id).values(last_used_at=now))
        return as_view(UsableKey, row)


def _adopt_local_rows(connection: sa.Connection, project: str) -> None:
    """Give all rows that were created without a key to `project`. Otherwise no key could read them."""
    move_totals(connection, LOCAL_OWNER, project)
    for table in Table.metadata.sorted_tables:
        if "owner" in table.c:
            connection.execute(table.update().where(table.c.owner == LOCAL_OWNER).values(owner=project))


def _write_event(
    connection: sa.Connection, now: datetime, row: sa.Row[Any], event: audit.AuditedEvent, actor: str
) -> None:
    details = {"key_id": row.id, "name": row.name, "prefix": row.prefix, "admin": row.admin}
    audit.write_event(connection, now, owner=row.project, event=event, actor=actor, details=details)


def hash_key(secret: str) -> str:
    """The SHA-256 of a key or token in hex, which the journal stores instead of it."""
    return hashlib.sha256(secret.encode()).hexdigest()
