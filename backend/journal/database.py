"""One engine per database: how connections are set up, and what a transaction for reading or writing is."""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, Protocol

import sqlalchemy as sa
from sqlalchemy import event
from sqlalchemy.engine import make_url

from tinkerflow.backend.clock import Clock
from tinkerflow.backend.errors import JournalBusyError

BUSY_SECONDS = 30.0
AWAY = (sa.exc.OperationalError, JournalBusyError)  # what is raised while the database cannot be asked: try again


def is_sqlite(url: str) -> bool:
    """Whether `url` names an SQLite file (the only other thing it may name is Postgres)."""
    return make_url(url).get_backend_name() == "sqlite"


def driver_url(url: str) -> sa.URL:
    """`url` with the driver we use: psycopg 3 for postgresql:// or postgres://."""
    parsed = make_url("postgresql" + url.removeprefix("postgres") if url.startswith("postgres:") else url)
    return parsed.set(drivername="postgresql+psycopg") if parsed.drivername == "postgresql" else parsed


class Database:
    """An engine with two kinds of transactions. Thread-safe."""

    def __init__(self, url: str) -> None:
        """Prepare the engine; an SQLite file's folder is made. Nothing is connected yet."""
        self.url = url
        self.epoch: int | None = None  # of the engine's lease that this process holds
        parsed = driver_url(url)
        self._sqlite = is_sqlite(url)
        if self._sqlite:
            if not parsed.database or parsed.database == ":memory:":
                raise ValueError(f"database URL {url!r}: the journal is shared by processes, so it needs a file")
            Path(parsed.database).parent.mkdir(parents=True, exist_ok=True)
            self.engine = sa.create_engine(parsed, pool_size=8, max_overflow=24, connect_args={"timeout": BUSY_SECONDS})
            event.listen(self.engine, "connect", _set_up_sqlite)
        else:
            self.engine = sa.create_engine(parsed, pool_size=8, max_overflow=24, pool_pre_ping=False)
        # Threads of one process queue here rather than in SQLite's busy handler, which sleeps up to 100 ms a time.
        self._turn: Any = threading.Lock() if self._sqlite else nullcontext()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """A transaction that only reads; it never waits for a writer."""
        with self.engine.begin() as connection:
            if self._sqlite:
                _driver(connection).execute("BEGIN")
            yield connection

    @contextmanager
    def write(self) -> Iterator[sa.Connection]:
        """A transaction that writes: committed at the end, rolled back by an exception."""
        with self._turn, self.engine.begin() as connection:
            if self._sqlite:
                _begin_to_write(connection)
            yield connection

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()


class Publisher(Protocol):
    """The part of Notifier that aggregates use."""

    def publish(self, *topics: str) -> None:
        """Wake the subscribers of `topics`."""
        ...


class Aggregate:
    """One group of rows that are read and written together. Every public method is one short transaction."""

    def __init__(self, database: Database, clock: Clock, notifier: Publisher) -> None:
        """Use the rows in `database`; `notifier` is told of changes after their commit."""
        self._database = database
        self._clock = clock
        self._publish = notifier.publish

    def _ago(self, seconds: float) -> datetime:
        return self._clock.now() - timedelta(seconds=seconds)


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # The driver must not open transactions on its own: we say BEGIN, and which one.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # NORMAL survives kill -9 of any process; only a power cut can take the last commits (never corrupt the file).
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


# Called by ourselves: an engine with a listener for it looks for listeners several times in every statement, too.
def _begin_to_write(connection: sa.Connection) -> None:
    # A writer takes the lock at once: a read transaction that upgrades later fails without waiting (SQLITE_BUSY).
    try:
        _driver(connection).execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        raise JournalBusyError(
            f"journal {connection.engine.url.database}: no turn to write within {BUSY_SECONDS:g} s ({error})"
        ) from error


def _driver(connection: sa.Connection) -> Any:
    return connection.connection.driver_connection
