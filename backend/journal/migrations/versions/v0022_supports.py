"""The supports of sampled tokens. They are not known for older samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0022"
down_revision = "v0021"


def upgrade() -> None:
    op.add_column("stability_info", sa.Column("supports", sa.LargeBinary(), nullable=True))
