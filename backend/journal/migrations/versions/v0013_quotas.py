"""Totals of each project's kept rows and of the bytes of its waiting requests. Existing rows are counted here."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0013"
down_revision = "v0012"
_ROW_BYTES = 256
_PENDING_INDEX = "ix_request_pending_of_owner"
# Each column of project_total with its table and the texts that count.
_KEPT = {
    "sessions": ("session", "tags user_metadata sdk_version project_id display_name"),
    "training_runs": ("model", "user_metadata base_model"),
    "samplers": ("sampler", "base_model model_path"),
    "custom_losses": ("custom_loss", "name definition"),
    "images": ("asset", ""),
    "feedback": ("feedback", "prompt answer text"),
}


def upgrade() -> None:
    numbers = (*_KEPT, "kept_bytes")
    op.create_table(
        "project_total",
        sa.Column("owner", sa.String(), nullable=False),
        *(sa.Column(name, sa.BigInteger(), nullable=False, server_default="0") for name in numbers),
        sa.PrimaryKeyConstraint("owner", name="pk_project_total"),
    )
    for kept, (table, texts) in _KEPT.items():
        sizes = [f"coalesce(length(CAST({name} AS TEXT)), 0)" for name in texts.split()]
        size = " + ".join([str(_ROW_BYTES), *sizes])
        op.execute(
            f"INSERT INTO project_total (owner, {kept}, kept_bytes)"
            f" SELECT owner, count(*), sum({size}) FROM {table} WHERE true GROUP BY owner"
            f" ON CONFLICT (owner) DO UPDATE SET {kept} = excluded.{kept},"
            " kept_bytes = project_total.kept_bytes + excluded.kept_bytes"
        )
    op.add_column("request", sa.Column("waiting_bytes", sa.BigInteger(), nullable=False, server_default="0"))
    op.execute("UPDATE request SET waiting_bytes = length(payload) WHERE state = 'pending'")
    op.drop_index(_PENDING_INDEX, "request")
    columns, waits = ["owner", "kind", "waiting_tokens", "waiting_bytes", "state"], sa.text("state = 'pending'")
    op.create_index(_PENDING_INDEX, "request", columns, sqlite_where=waits, postgresql_where=waits)
