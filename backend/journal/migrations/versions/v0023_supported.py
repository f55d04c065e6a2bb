"""In training steps, the share of tokens with a support. It is not known for older steps."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0023"
down_revision = "v0022"


def upgrade() -> None:
    op.add_column("training_step", sa.Column("supported", sa.Float(), nullable=True))
