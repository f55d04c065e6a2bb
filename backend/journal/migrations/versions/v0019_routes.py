"""The experts of sampled tokens. They are not known for older samples."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "v0019"
down_revision = "v0018"


def upgrade() -> None:
    op.add_column("stability_info", sa.Column("routes", sa.LargeBinary(), nullable=True))
    op.add_column("stability_info", sa.Column("base_model", sa.String(), nullable=True))
