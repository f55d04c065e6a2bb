"""The tables of recovery: snapshots of models, requests under suspicion, and which process does what."""

from __future__ import annotations

from datetime import datetime

import sqlalchemy as sa
from sqlmodel import Field

from tinkerflow.backend.journal.tables import Table, UtcDateTime


class RecoverySnapshot(Table, table=True):
    """A committed snapshot of a model (snapshot_id None), or of what one sampler samples. Clients never see it.

    seq_id: every request of the model up to it, and none after it, is in the snapshot. snapshot_id: as in the worker
    group; when a later publication has taken the id over, the path stands for it, which no sampler uses.
    """

    __tablename__ = "recovery_snapshot"
    __table_args__ = (sa.Index("ix_recovery_snapshot_model_id_seq_id", "model_id", "seq_id"),)

    path: str = Field(primary_key=True)
    model_id: str = Field(foreign_key="model.id")
    seq_id: int = Field(sa_type=sa.BigInteger)
    snapshot_id: str | None = Field(default=None, unique=True)
    step: int
    size_bytes: int = Field(sa_type=sa.BigInteger)
    created_at: datetime = Field(sa_type=UtcDateTime)


class Suspect(Table, table=True):
    """A request that a worker group was executing when it ended. crashes: how many groups ended by themselves."""

    __tablename__ = "suspect"

    request_id: str = Field(primary_key=True, foreign_key="request.id")
    deaths: int
    crashes: int


class Process(Table, table=True):
    """A part of the service. Of the engine: its lease; whoever raised `epoch` last holds it. Of the API: its beats.

    began_at: since when it beats without a pause.
    """

    __tablename__ = "process"

    name: str = Field(primary_key=True)
    holder: str
    epoch: int
    began_at: datetime = Field(sa_type=UtcDateTime)
    beat_at: datetime = Field(sa_type=UtcDateTime)
