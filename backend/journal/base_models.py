"""The base models that the engine serves. The engine writes them at start, and the API reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

import msgspec
import sqlalchemy as sa
from sqlmodel import col

from tinkerflow.backend.journal.database import Aggregate
from tinkerflow.backend.journal.tables import BaseModelRow
from tinkerflow.backend.spec.commands import CompileStatus, GroupInfo


@dataclass(frozen=True)
class BaseModelView:
    """A base model that the engine serves. card: its ModelCard as JSON text.

    registered_at: when the engine started. compile_status: the programs that its worker group has compiled, if known.
    worker_group: the fields of the group's GroupInfo as JSON values, if known. progress: why requests wait, or None.
    """

    name: str
    card: str
    registered_at: datetime
    compile_status: CompileStatus | None = None
    worker_group: Mapping[str, Any] | None = None
    progress: str | None = None


class BaseModels(Aggregate):
    """The base models that the engine serves."""

    def register(self, models: Sequence[tuple[str, str]]) -> None:
        """Replace the list of base models with `models`: (name, card as JSON text) pairs."""
        rows = [{"name": name, "card": card, "registered_at": self._now()} for name, card in models]
        with self._write() as connection:
            connection.execute(sa.delete(BaseModelRow))
            if rows:
                connection.execute(sa.insert(BaseModelRow), rows)

    def all(self) -> list[BaseModelView]:
        """The served base models in the order of their names."""
        with self._read() as connection:
            rows = connection.execute(sa.select(BaseModelRow).order_by(col(BaseModelRow.name))).all()
        return [
            BaseModelView(
                row.name,
                row.card,
                row.registered_at,
                None if row.compile_status is None else CompileStatus(**json.loads(row.compile_status)),
                None if row.worker_group is None else json.loads(row.worker_group),
                row.progress,
            )
            for row in rows
        ]

    def note_compile_status(self, base_model: str, status: CompileStatus) -> None:
        """Store the compile status of a base model's worker group."""
        self._set(base_model, compile_status=json.dumps(msgspec.structs.asdict(status)))

    def note_worker_group(self, base_model: str, group: GroupInfo) -> None:
        """Store the devices, memory and size of a base model's worker group."""
        self._set(base_model, worker_group=json.dumps(asdict(group)))

    def note_card(self, base_model: str, card: str) -> None:
        """Store the changed card of a base model, as JSON text."""
        self._set(base_model, card=card)

    def note_progress(self, base_model: str, text: str | None) -> None:
        """Set the reason why requests for a base model wait; None if they do not."""
        self._set(base_model, progress=text)

    def _set(self, base_model: str, **values: str | None) -> None:
        with self._write(lasting=False) as connection:
            connection.execute(sa.update(BaseModelRow).where(col(BaseModelRow.name) == base_model).values(**values))
