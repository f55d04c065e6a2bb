"""Drops columns that no code reads, and gives other columns the names that the code uses."""

from __future__ import annotations

from alembic import op

revision = "v0002"
down_revision = "v0001"


def upgrade() -> None:
    """Bring the schema here, in place.

    Postgres does not touch the rows. SQLite (3.35) writes every row of `request` again: 3 s for 500 MB, and as much
    disk space again for its write-ahead log.
    """
    op.execute("ALTER TABLE request DROP COLUMN payload_type")
    op.execute("ALTER TABLE base_model DROP COLUMN generation")
    op.execute("ALTER TABLE base_model RENAME COLUMN warmth TO compile_status")
    op.execute("ALTER TABLE model RENAME COLUMN held TO paused")
    # The state `lost` was removed, because no version ever made a sampler `lost`.
    op.execute("UPDATE sampler SET state = 'closed' WHERE state = 'lost'")
