"""Names of base models have no slash at their end. Earlier releases kept `--base-model models/tiny/` as given."""

from __future__ import annotations

from alembic import op

revision = "v0012"
down_revision = "v0011"
_TABLES = ("model", "sampler", "checkpoint", "upload", "feedback")  # the engine writes the table base_model again


def upgrade() -> None:
    """Bring the rows here, in place. Usage that was already counted keeps its name."""
    for table in _TABLES:
        op.execute(f"UPDATE {table} SET base_model = rtrim(base_model, '/') WHERE base_model LIKE '%_/'")
