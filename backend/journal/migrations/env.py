"""Alembic's entry: run the migrations on the connection that `migrate.py` opened, in its transaction.

The function `upgrade` of each migration brings the schema to its revision, in place.
"""

from __future__ import annotations

from alembic import context

from tinkerflow.backend.journal import tables

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=tables.Session.metadata,
    render_as_batch=True,  # SQLite alters tables by copying them
)
with context.begin_transaction():
    context.run_migrations()
