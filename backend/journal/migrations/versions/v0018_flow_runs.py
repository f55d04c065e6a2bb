"""The flow runs that show training runs in Prefect. Older runs have none until an engine shows them again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0018"
down_revision = "v0017"


def upgrade() -> None:
    op.add_column("model", sa.Column("flow_run", sa.String(), nullable=True))
