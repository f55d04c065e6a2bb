"""Secrets of the service itself, which all its processes share: made once, on first use, and kept in the journal."""

from __future__ import annotations

import secrets
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.statements import insert_if_absent
from tinkerflow.backend.journal.tables import ServiceSecret


def service_secret(connection: sa.Connection, name: str, now: datetime) -> bytes:
    """The 32 random bytes under `name`."""
    insert_if_absent(connection, ServiceSecret, {"name": name, "value": secrets.token_bytes(32), "created_at": now})
    return connection.execute(sa.select(col(ServiceSecret.value)).where(col(ServiceSecret.name) == name)).scalar_one()
