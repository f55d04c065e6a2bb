"""The base models that the engine serves, written by it at start and read by the API."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime

import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.commands import CompileStatus
from tinkerflow.backend.journal.tables import BaseModelRow
from tinkerflow.backend.journal.views import BaseModelView


def register_base_models(connection: sa.Connection, models: Sequence[tuple[str, str]], now: datetime) -> None:
    """Replace the list by `models`: (name, card as JSON text) pairs."""
    latest = connection.execute(sa.select(sa.func.max(col(BaseModelRow.generation)))).scalar()
    connection.execute(sa.delete(BaseModelRow))
    rows = [
        {"name": name, "card": card, "registered_at": now, "generation": (latest or 0) + 1} for name, card in models
    ]
    if rows:
        connection.execute(sa.insert(BaseModelRow), rows)


def base_models(connection: sa.Connection) -> list[BaseModelView]:
    """What is served now, by name."""
    rows = connection.execute(sa.select(BaseModelRow).order_by(col(BaseModelRow.name)))
    return [
        BaseModelView(row.name, row.card, None if row.warmth is None else CompileStatus(**json.loads(row.warmth)))
        for row in rows
    ]


def note_compile_status(connection: sa.Connection, base_model: str, warmth: CompileStatus) -> None:
    """Keep what the worker group of a base model last said of its programs."""
    text = json.dumps(asdict(warmth))
    connection.execute(sa.update(BaseModelRow).where(col(BaseModelRow.name) == base_model).values(warmth=text))
