"""The routing agreement of training steps. It is not known for older steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0020"
down_revision = "v0019"


def upgrade() -> None:
    op.add_column("training_step", sa.Column("agreement", sa.Float(), nullable=True))
