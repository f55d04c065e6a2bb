"""API keys: 256 random bits each, of which only the SHA-256 is kept. A key opens its project's rows and no others."""

from __future__ import annotations

import hashlib
import hmac
import secrets
from datetime import datetime, timedelta
from typing import Any

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.ids import new_id
from tinkerflow.backend.journal import audit
from tinkerflow.backend.journal.statements import missing
from tinkerflow.backend.journal.tables import ApiKey
from tinkerflow.backend.journal.views import KeyView, key_view

PREFIX = "tml-"
_SHOWN = len(PREFIX) + 6
_USE_NOTED_EVERY = timedelta(minutes=1)  # so that checking a key is a read, nearly always

_USABLE = sa.select(ApiKey).where(col(ApiKey.id) == sa.bindparam("key_id"), col(ApiKey.revoked_at).is_(None))
_FIND = sa.select(ApiKey).where(col(ApiKey.key_hash) == sa.bindparam("hashed"), col(ApiKey.revoked_at).is_(None))


def create_key(connection: sa.Connection, name: str, project: str, admin: bool, now: datetime) -> tuple[KeyView, str]:
    """Make a key; what is stored of it, and the secret, which can never be shown again."""
    secret = PREFIX + secrets.token_urlsafe(32)
    row = connection.execute(
        sa.insert(ApiKey)
        .values(
            id=new_id("key"),
            key_hash=_hash(secret),
            prefix=secret[:_SHOWN],
            name=name,
            project=project,
            admin=admin,
            created_at=now,
        )
        .returning(*sa.inspect(ApiKey).local_table.columns)
    ).one()
    _note(connection, now, row, audit.Event.PROJECT_KEY_CREATED)
    return key_view(row), secret


def keys(connection: sa.Connection) -> list[KeyView]:
    """All keys, revoked ones too, oldest first."""
    rows = connection.execute(sa.select(ApiKey).order_by(col(ApiKey.created_at), col(ApiKey.id)))
    return [key_view(row) for row in rows]


def revoke_key(connection: sa.Connection, key_id: str, now: datetime) -> KeyView:
    """Make a key useless from now on; a revoked one stays as it is. NotFoundError for an unknown id."""
    revoked = connection.execute(
        sa.update(ApiKey)
        .where(col(ApiKey.id) == key_id, col(ApiKey.revoked_at).is_(None))
        .values(revoked_at=now)
        .returning(*sa.inspect(ApiKey).local_table.columns)
    ).one_or_none()
    if revoked is not None:
        _note(connection, now, revoked, audit.Event.PROJECT_KEY_REVOKED)
        return key_view(revoked)
    row = connection.execute(sa.select(ApiKey).where(col(ApiKey.id) == key_id)).one_or_none()
    if row is None:
        raise missing(ApiKey, key_id)
    return key_view(row)


def find_key(connection: sa.Connection, secret: str) -> KeyView | None:
    """The key with this secret, or None when there is none or it is revoked. One statement."""
    hashed = _hash(secret)
    row = connection.execute(_FIND, {"hashed": hashed}).one_or_none()
    # The look-up is by a hash that nobody can steer; comparing again costs nothing and does not depend on the index.
    return key_view(row) if row is not None and hmac.compare_digest(row.key_hash, hashed) else None


def usable_key(connection: sa.Connection, key_id: str) -> KeyView | None:
    """The key, or None when there is none or it is revoked. One statement."""
    row = connection.execute(_USABLE, {"key_id": key_id}).one_or_none()
    return None if row is None else key_view(row)


def use_is_due(key: KeyView, now: datetime) -> bool:
    """Whether the key's last use was noted so long ago that this one should be."""
    return key.last_used_at is None or now - key.last_used_at >= _USE_NOTED_EVERY


def note_use(connection: sa.Connection, key_id: str, now: datetime) -> None:
    """Note that a key was used."""
    connection.execute(sa.update(ApiKey).where(col(ApiKey.id) == key_id).values(last_used_at=now))


def has_keys(connection: sa.Connection) -> bool:
    """Whether a key was ever made: revoking the last one must not open the door again."""
    return connection.execute(sa.select(col(ApiKey.id)).limit(1)).first() is not None


def _note(connection: sa.Connection, now: datetime, row: sa.Row[Any], event: audit.Event) -> None:
    details = {"key_id": row.id, "name": row.name, "prefix": row.prefix, "admin": row.admin}
    audit.note(connection, now, owner=row.project, event=event, details=details)


def _hash(secret: str) -> str:
    return hashlib.sha256(secret.encode()).hexdigest()
