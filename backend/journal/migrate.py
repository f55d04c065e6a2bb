"""Migration of a database to the current schema with Alembic, and the check that it has that schema.

New revisions are written by hand in migrations/versions, one after the other. The schema is never downgraded. A test
compares the migrated database with the tables and lists the differences.

Alembic is imported only to change a schema, because it takes 0.2 s, and 15 ms more to read all revisions.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import sqlalchemy as sa

from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.journal.database import Database, connecting_first

_MIGRATIONS = Path(__file__).parent / "migrations"
_REVISIONS = sorted(file.name.partition("_")[0] for file in (_MIGRATIONS / "versions").glob("v*.py"))
_LOCK = 0x74696E6B  # any number, the same in every process


class NoTablesError(ServerError):
    """The database is empty, because it has not been migrated yet."""


def migrate(url: str, revision: str = "head") -> None:
    """Upgrade the database to the newest schema (or to `revision`). Creates a missing SQLite file.

    Several processes may call this concurrently. One migrates in a transaction, and the others wait for it. UserError:
    the server refuses the URL.
    """
    with closing(Database(url)) as database, connecting_first(), database.write() as connection:
        if connection.dialect.name == "postgresql":
            connection.execute(sa.select(sa.func.pg_advisory_xact_lock(_LOCK)))
        if revision == "head" and _revision(connection) == _REVISIONS[-1]:
            return
        from alembic import command
        from alembic.config import Config

        config = Config()
        config.set_main_option("script_location", _MIGRATIONS.as_posix().replace("%", "%%"))
        config.set_main_option("path_separator", "os")
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def check_revision(database: Database) -> None:
    """Raise ServerError unless the database has the newest schema, and NoTablesError if it is empty.

    UserError: the server refuses the database's URL.
    """
    newest = _REVISIONS[-1]
    with connecting_first(), database.read() as connection:
        found = _revision(connection)
    if found != newest:
        name = sa.make_url(database.url).render_as_string(hide_password=True)
        text = f"database {name}: its schema is at revision {found}, this version needs {newest}; "
        if found is None:
            raise NoTablesError(text + "`tinkerflow up` creates the tables")
        if found in _REVISIONS:
            raise ServerError(text + "the database is of an earlier version: `tinkerflow up` upgrades it")
        raise ServerError(text + "the database is of a later version: install that version")


def _revision(connection: sa.Connection) -> str | None:
    """The database's revision, in Alembic's table; None before the first migration."""
    if not sa.inspect(connection).has_table("alembic_version"):
        return None
    return connection.execute(sa.text("SELECT version_num FROM alembic_version")).scalar()
