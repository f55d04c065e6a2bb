"""The flow runs that show training runs in Prefect. Of earlier runs none is known until an engine shows them again."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0018"
down_revision = "v0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Bring the schema here, in place. No row changes."""
    op.add_column("model", sa.Column("flow_run", sa.String(), nullable=True))
