"""The routing agreement of training steps in the first layer with experts. It is not known for older steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0024"
down_revision = "v0023"


def upgrade() -> None:
    op.add_column("training_step", sa.Column("first_agreement", sa.Float(), nullable=True))
