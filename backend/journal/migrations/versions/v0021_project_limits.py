"""A project's own limits. At first, no project has any."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0021"
down_revision = "v0020"


def upgrade() -> None:
    op.create_table(
        "project_limit",
        sa.Column("project", sa.String(), nullable=False),
        sa.Column("limits", sa.JSON(), nullable=False),
        sa.PrimaryKeyConstraint("project", name="pk_project_limit"),
    )
