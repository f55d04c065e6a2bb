"""Migration of a database to the current schema with Alembic, and the check that it has that schema.

New revisions are written by hand in migrations/versions. The schema is never downgraded. A test compares the migrated
database with the tables and lists the differences.
"""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import sqlalchemy as sa
from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory

from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.journal.database import Database, connecting_first

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
        config = _config()
        config.attributes["connection"] = connection
        command.upgrade(config, revision)


def check_revision(database: Database) -> None:
    """Raise ServerError unless the database has the newest schema, and NoTablesError if it is empty.

    UserError: the server refuses the database's URL.
    """
    scripts = ScriptDirectory.from_config(_config())
    newest = scripts.get_current_head()
    with connecting_first(), database.read() as connection:
        found = MigrationContext.configure(connection).get_current_revision()
    if found != newest:
        name = sa.make_url(database.url).render_as_string(hide_password=True)
        text = f"database {name}: its schema is at revision {found}, this version needs {newest}; "
        if found is None:
            raise NoTablesError(text + "`tinkerflow up` creates the tables")
        if found in {script.revision for script in scripts.walk_revisions()}:
            raise ServerError(text + "the database is of an earlier version: `tinkerflow up` upgrades it")
        raise ServerError(text + "the database is of a later version: install that version")


def _config() -> Config:
    config = Config()
    config.set_main_option("script_location", (Path(__file__).parent / "migrations").as_posix().replace("%", "%%"))
    config.set_main_option("path_separator", "os")
    return config
