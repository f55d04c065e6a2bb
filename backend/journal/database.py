"""The database: connections, transactions, and the statements that all aggregates share.

Statements used in every request are module constants with bound parameters, here and in the aggregates, because
building a statement costs more than executing it.
"""

from __future__ import annotations

import itertools
import json
import re
import sqlite3
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import fields
from datetime import UTC, datetime
from enum import StrEnum
from functools import cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_type_hints

import sqlalchemy as sa
from sqlalchemy import Row, event
from sqlalchemy.engine import Dialect, make_url
from sqlmodel import SQLModel, col

from tinkerflow.backend.core.clock import Clock, add_seconds
from tinkerflow.backend.core.disk import flush, make_folder, make_private, open_private
from tinkerflow.backend.core.errors import FencedError, JournalBusyError, NotFoundError, UserError

BUSY_SECONDS = 30.0
AWAY = (sa.exc.OperationalError, JournalBusyError)  # errors while the database is unavailable; callers try again
_UNWRITABLE = {  # by SQLSTATE; a server is read-only after a failover, for example
    "25006": "takes no writes at present",
    "25P03": "ended a transaction that paused for too long",
    "25P04": "ended a transaction that took too long",
}
_REFUSAL = re.compile(  # of Postgres and its client library, which give no SQLSTATE for a failed connection
    r"(password authentication failed|no password supplied|\w[^:\n]*pg_hba\.conf|permission denied for database"
    r"|(database|role) \"[^\n]*\" (does not exist|is not permitted))[^\n]*"
)
_PROGRAM_LIMIT = "54"  # class of SQLSTATEs: an index's value is too long, for example
NAMES = {
    "ix": "ix_%(table_name)s_%(column_0_N_name)s",
    "uq": "uq_%(table_name)s_%(column_0_N_name)s",
    "fk": "fk_%(table_name)s_%(column_0_name)s",
    "pk": "pk_%(table_name)s",
}
# How long Postgres's host may be unreachable before a connection counts as broken: 20 s, instead of 15 minutes for a
# request and two hours for its answer. A host that lost its power or its network never closes its connections.
_IMPATIENCE = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "2",
    "tcp_user_timeout": "20000",
}
# Settings of the Postgres server. A process that is unreachable or stopped must not keep its locks, because the next
# engine would wait for them.
_POSTGRES = (
    "SET idle_in_transaction_session_timeout = '15s'; SET tcp_keepalives_idle = 10; "
    "SET tcp_keepalives_interval = 5; SET tcp_keepalives_count = 2"
)
_AT_ONCE = 10_000  # SQLite allows 32,766 parameters
PAGE_BYTES = 2**22  # the most text in one page of a list; longer texts mean fewer rows
MOST_OF_SESSION = 10_000  # models (or samplers) in a session's list
_ROWS_AT_ONCE = 32  # rows that a page fetches from the database at a time
_PROCESS = sa.table("process", sa.column("name"), sa.column("epoch"))
_LEASE = sa.select(_PROCESS.c.epoch).where(_PROCESS.c.name == "engine").with_for_update(read=True)

T = TypeVar("T")
Owned = type[Any]  # a table with the columns `id` and `owner`
RowLock = Literal["share", "change"]  # for many transactions that read a row, or for one that may change it


# ------------------------------------------------------------------ tables and their columns
# Requests are validated earlier (backend/wire/validation.py). The sizes here are the last line of defense: every column
# has a limit for all code that writes it.
ID_BYTES = 1024  # of an id, a path, a name of a kind or state
NAME_BYTES = 4096  # of a client's name for an object: 1,024 characters in UTF-8
TEXT_BYTES = 2**16  # of a message or a reason
JSON_BYTES = 2**20


class TooLongError(UserError, sa.exc.DontWrapMixin):
    """A text or JSON value exceeds its column's limit. SQLAlchemy does not wrap this error."""


class UtcDateTime(sa.types.TypeDecorator[datetime]):
    """Timezone-aware datetimes in UTC. SQLite stores no zone: writing removes it and reading adds it again."""

    impl = sa.DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Convert to UTC. ValueError: a naive datetime."""
        if value is None:
            return None
        if value.tzinfo is None:
            raise ValueError(f"datetime {value!r} has no time zone: the journal accepts only aware datetimes")
        try:
            return value.astimezone(UTC)
        except OverflowError:  # the calendar's first or last day, in another time zone
            return (datetime.min if value.year == 1 else datetime.max).replace(tzinfo=UTC)

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:
        """Return a timezone-aware datetime in UTC."""
        if value is None:
            return None
        return value.replace(tzinfo=UTC) if value.tzinfo is None else value.astimezone(UTC)


class Text(sa.types.TypeDecorator[str]):
    """A text of at most `most` bytes in UTF-8. TooLongError: a longer text."""

    impl = sa.String
    cache_ok = True

    def __init__(self, most: int = ID_BYTES) -> None:
        """most: bytes."""
        super().__init__()
        self.most = most

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        if value is not None and len(value) * 4 > self.most and (size := len(value.encode())) > self.most:
            raise TooLongError(f"a string has {size} bytes: must have at most {self.most} to be stored")
        return value


class CutText(Text):
    """A text that the service writes for people, such as an error. Longer texts are cut to `most` bytes."""

    cache_ok = True

    def __init__(self, most: int = TEXT_BYTES) -> None:
        super().__init__(most)

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """Cut the text, because a failure must be stored even if its message is long."""
        if value is None or len(value) * 4 <= self.most:
            return value
        return value.encode()[: self.most].decode(errors="ignore")


class Json(sa.types.TypeDecorator[Any]):
    """JSON of at most `most` bytes. TooLongError: it is longer. none_as_null: None becomes NULL, not JSON's null."""

    impl = sa.JSON
    cache_ok = True

    def __init__(self, most: int = JSON_BYTES, *, none_as_null: bool = False) -> None:
        """most: bytes."""
        super().__init__(none_as_null=none_as_null)
        self.most = most

    def process_bind_param(self, value: Any, dialect: Dialect) -> Any:
        if value and (size := len(json.dumps(value))) > self.most:
            raise TooLongError(f"metadata has {size} bytes as JSON: must have at most {self.most} to be stored")
        return value


class Table(SQLModel):
    """Base class of the tables. Their MetaData is separate from that of other users of SQLModel."""

    metadata = sa.MetaData(naming_convention=NAMES)


# ------------------------------------------------------------------ connections and transactions
def is_sqlite(url: str) -> bool:
    """Whether `url` is an SQLite file. Other URLs are Postgres databases."""
    return make_url(url).get_backend_name() == "sqlite"


def driver_url(url: str) -> sa.URL:
    """`url` with its driver: psycopg 3 for postgresql:// and postgres://, with _IMPATIENCE as default options.

    `url` contains the literal path of an SQLite file. SQLAlchemy 2.1 would decode %20 in it, but 2.0 does not.
    """
    if url.startswith("sqlite:///"):
        return make_url(url).set(database=url.removeprefix("sqlite:///").partition("?")[0])
    parsed = make_url("postgresql" + url.removeprefix("postgres") if url.startswith("postgres:") else url)
    if parsed.drivername != "postgresql":
        return parsed
    return parsed.set(drivername="postgresql+psycopg", query={**_IMPATIENCE, **parsed.query})


class _SharedFlush:
    """Flushes a file to disk. Threads that wait at the same time share a flush."""

    def __init__(self, file: Path) -> None:
        """file: need not exist."""
        self._file = file
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        self._flushed = 0  # numbers up to this one were drawn before the last flush began

    def flush(self) -> None:
        """Return when everything that was written before the call is on disk. OSError: the disk fails."""
        number = next(self._numbers)
        with self._lock:
            if self._flushed < number:
                latest = next(self._numbers)
                with suppress(FileNotFoundError):  # SQLite flushed the database before it removed the file
                    flush(self._file)
                self._flushed = latest


class Database:
    """An engine with two kinds of transactions. Thread-safe.

    epoch: the epoch of the engine's lease if this process holds the lease (leases.py), otherwise None.
    """

    def __init__(self, url: str) -> None:
        """Prepare the engine without connecting. Creates the folder of an SQLite file.

        ValueError: an SQLite URL without a file.
        """
        self.url = url
        self.epoch: int | None = None
        parsed = driver_url(url)
        self._sqlite = is_sqlite(url)
        if self._sqlite:
            if not parsed.database or parsed.database == ":memory:":
                raise ValueError(f"database URL {url!r}: the journal is shared by processes, so it needs a file")
            _make_private_file(Path(parsed.database))
            self._log: _SharedFlush | None = _SharedFlush(Path(f"{parsed.database}-wal"))
            self.engine = sa.create_engine(parsed, pool_size=8, max_overflow=24, connect_args={"timeout": BUSY_SECONDS})
            event.listen(self.engine, "connect", _set_up_sqlite)
        else:
            self._log = None  # Postgres flushes at each commit
            self.engine = sa.create_engine(parsed, pool_size=8, max_overflow=24, pool_pre_ping=False)
            event.listen(self.engine, "handle_error", _leave_unwritable)
            event.listen(self.engine, "connect", _set_up_postgres)
        event.listen(self.engine, "handle_error", _name_fault)
        event.listen(self.engine, "checkin", self._close_returned)
        self._closed = False
        # The threads of a process wait here, because SQLite's busy handler sleeps up to 100 ms between attempts.
        self._turn: Any = threading.Lock() if self._sqlite else nullcontext()

    @contextmanager
    def read(self) -> Iterator[sa.Connection]:
        """Open a read-only transaction. It never waits for a writer."""
        with self.engine.begin() as connection:
            if self._sqlite:
                _driver(connection).execute("BEGIN")
            yield connection

    @contextmanager
    def write(self, *, fenced: bool = False, lasting: bool = True) -> Iterator[sa.Connection]:
        """Open a write transaction. It commits at the end of the block, and rolls back after an exception.

        fenced: raise FencedError if this process has lost the engine's lease to another process. lasting: return after
        the commit is on disk. Otherwise a power cut may lose this commit, together with all later commits.
        JournalBusyError: SQLite's write lock was not free within BUSY_SECONDS, its disk fails, or Postgres takes no
        writes.
        """
        with self._turn, self.engine.begin() as connection:
            if self._sqlite:
                _begin_to_write(connection)
            if fenced and self.epoch is not None:
                check_lease(connection, self.epoch)
            yield connection
        if lasting and self._log is not None:  # after the write lock is released, so that commits share a flush
            try:
                self._log.flush()
            except OSError as error:  # such as a full disk; a caller that tries again finds its commit
                raise JournalBusyError(f"journal {self.url}: its last commit is not on disk yet ({error})") from error

    def close(self) -> None:
        """Close all connections. Another thread's connection is closed at the end of its transaction."""
        self._closed = True
        self.engine.dispose()

    def _close_returned(self, _connection: Any, record: Any) -> None:
        """Close a connection that a thread returns after the close, because no pool would ever close it."""
        if self._closed:
            record.invalidate()


class Aggregate:
    """A group of rows that are read and written together. Every public method is one short transaction."""

    def __init__(self, database: Database, clock: Clock, publish: Callable[..., None]) -> None:
        """database: to read and write. publish: called with the topics of each commit."""
        self._database = database
        self._read = database.read
        self._write = database.write
        self._now = clock.now
        self._publish = publish

    def _views(self, view: type[T], statement: sa.Select[Any]) -> list[T]:
        """The rows of one statement as views, in a separate transaction."""
        with self._read() as connection:
            return [as_view(view, row) for row in connection.execute(statement)]

    def _column(self, statement: sa.Select[tuple[T]]) -> list[T]:
        """The first column of a statement's rows, in a separate transaction."""
        with self._read() as connection:
            return list(connection.execute(statement).scalars())

    def _ago(self, seconds: float) -> datetime:
        return add_seconds(self._now(), -seconds)


def check_lease(connection: sa.Connection, epoch: int) -> None:
    """FencedError unless `epoch` still holds the engine's lease. No engine can take it until the transaction ends."""
    if connection.execute(_LEASE).scalar() != epoch:
        raise FencedError(f"another engine has taken over this journal: epoch {epoch} has ended and may not write")


@contextmanager
def connecting_first() -> Iterator[None]:
    """Wrap the first use of a database. UserError: it refuses the user, the password or the name of its URL.

    Later, the caller waits for such a database, too. Its administrator may be changing the password.
    """
    try:
        yield
    except sa.exc.OperationalError as error:
        if (why := refusal(str(error.orig))) is None:
            raise
        fix = "correct the user, the password or the name of the database in TINKERFLOW_DATABASE_URL"
        raise UserError(f"database_url: the server refuses the connection ({why}): {fix}") from error


def refusal(message: str) -> str | None:
    """Why a Postgres server refuses the URL of its database, from the message of its driver; None for an outage.

    If there were several attempts, such as one for each address of the host, the server must have refused all.
    """
    first, *attempts = message.split("\n- ")
    found = [_REFUSAL.search(attempt) for attempt in attempts or [first]]
    return found[0][0] if found[0] is not None and None not in found else None


def _name_fault(context: sa.engine.ExceptionContext) -> sa.exc.ProgrammingError | None:
    """Replace an OperationalError about a wrong statement, such as one that names no table, because it is not AWAY.

    Postgres raises ProgrammingError for most of these. SQLite reports them all like a full disk.
    """
    original = context.original_exception
    is_fault = getattr(original, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR
    is_fault = is_fault or (getattr(original, "sqlstate", None) or "").startswith(_PROGRAM_LIMIT)
    if not is_fault or not isinstance(context.sqlalchemy_exception, sa.exc.OperationalError):
        return None
    return sa.exc.ProgrammingError(context.statement, context.parameters, original)


def _leave_unwritable(context: sa.engine.ExceptionContext) -> JournalBusyError | None:
    """Replace the error of a Postgres server that takes no writes or ended a transaction, and close its connections."""
    if (why := _UNWRITABLE.get(getattr(context.original_exception, "sqlstate", None) or "")) is None:
        return None
    context.is_disconnect = True  # after a failover, the same address may lead to a server that takes writes
    return JournalBusyError(f"the journal's database {why} ({context.original_exception})")


def _make_private_file(file: Path) -> None:
    """Create an SQLite file that only its owner can read, or correct its mode. -wal and -shm get the same mode."""
    try:
        make_folder(file.parent)
        with suppress(FileExistsError):  # closing an existing file would release this process's locks
            open_private(file, "xb").close()
    except FileNotFoundError as error:  # in /proc, for example
        raise UserError(f"database '{file}': cannot be created ({error.strerror}): choose another folder") from error
    make_private(file, *(file.with_name(f"{file.name}{suffix}") for suffix in ("-wal", "-shm", "-journal")))


def _set_up_sqlite(connection: Any, _record: object) -> None:
    # The driver must not open transactions: read() and write() send their own BEGIN.
    connection.isolation_level = None
    cursor = connection.cursor()
    cursor.execute("PRAGMA journal_mode=WAL")
    # NORMAL survives kill -9 of any process. `Database.write` flushes the commits that must survive a power cut.
    cursor.execute("PRAGMA synchronous=NORMAL")
    cursor.execute("PRAGMA foreign_keys=ON")
    cursor.close()


def _set_up_postgres(connection: Any, _record: object) -> None:
    with connection.cursor() as cursor:
        cursor.execute(_POSTGRES)
    connection.commit()


# Not an event listener, because an engine with listeners looks them up several times in every statement.
def _begin_to_write(connection: sa.Connection) -> None:
    # Take the write lock now, because a read transaction that upgrades later fails without waiting (SQLITE_BUSY).
    try:
        _driver(connection).execute("BEGIN IMMEDIATE")
    except sqlite3.OperationalError as error:
        raise JournalBusyError(
            f"journal {connection.engine.url.database}: no write lock within {BUSY_SECONDS:g} s ({error})"
        ) from error


def _driver(connection: sa.Connection) -> Any:
    return connection.connection.driver_connection


# ------------------------------------------------------------------ statements that aggregates share
def in_chunks(items: Collection[T]) -> Iterator[list[T]]:
    """The items in lists of ten thousand, few enough for the parameters of a statement."""
    listed = list(items)
    return (listed[start : start + _AT_ONCE] for start in range(0, len(listed), _AT_ONCE))


def get_owned(
    connection: sa.Connection, table: type[Table], row_id: str, owner: str | None, *, lock: RowLock | None = None
) -> Row[Any]:
    """The row `row_id` of `table`. NotFoundError: the row is missing or has another owner.

    This function alone decides access to sessions, models, samplers and requests. owner: None may access all rows.
    lock: lock the row against changes until the transaction of `connection` ends. A transaction that may change the row
    must choose `change`. Two transactions that share the lock and then change the row would wait for each other.
    """
    found = connection.execute(_select_owned(table, lock), {"row_id": row_id, "as_owner": owner}).one_or_none()
    if found is None:
        raise missing(table, row_id)
    return found


def is_owned(table: Owned) -> sa.ColumnElement[bool]:
    """The filter of get_owned as a prepared condition with the parameters `row_id` and `as_owner`."""
    owner = sa.bindparam("as_owner", type_=sa.String)
    is_row = col(table.id) == sa.bindparam("row_id")
    return sa.and_(is_row, sa.or_(owner.is_(None), col(table.owner) == owner), *_not_deleted(table))


def owned_by(table: Owned, owner: str | None) -> tuple[sa.ColumnElement[bool], ...]:
    """The filter for lists: the rows of one owner, or all rows if `owner` is None. Deleted rows are left out."""
    return (*_not_deleted(table), *(() if owner is None else (col(table.owner) == owner,)))


def _not_deleted(table: Owned) -> tuple[sa.ColumnElement[bool], ...]:
    deleted_at = getattr(table, "deleted_at", None)
    return () if deleted_at is None else (col(deleted_at).is_(None),)


def newest_page(
    connection: sa.Connection,
    rows: sa.Select[Any],
    key: str,
    *,
    limit: int,
    after: tuple[datetime, str] | None,
    matches: Callable[[Row[Any]], bool] | None = None,
) -> tuple[list[Row[Any]], bool]:
    """At most `limit` rows with PAGE_BYTES of text, newest first, and whether there are more.

    connection: to read with. rows: selects from one table, which has `created_at`. key: the column that orders rows of
    the same time. after: created_at and key of the previous page's last row. matches: an additional filter in Python,
    or None.
    """
    created_at, tie = rows.selected_columns["created_at"], rows.selected_columns[key]
    older = rows.order_by(created_at.desc(), tie.desc())
    if after is not None:
        same = sa.and_(created_at == after[0], tie < after[1])
        # The first condition alone lets SQLite begin at this place of an index.
        older = older.where(created_at <= after[0], sa.or_(created_at < after[0], same))
    if matches is None:
        older = older.limit(limit + 1)
    page: list[Row[Any]] = []
    room = PAGE_BYTES
    # One statement: many databases would sort all rows again for each part of them.
    with connection.execute(older, execution_options={"yield_per": _ROWS_AT_ONCE}) as found:
        for row in filter(matches, found) if matches else found:
            room -= size_of(row)
            if page and (room < 0 or len(page) == limit):
                return page, True
            page.append(row)
    return page, False


def fetch_page(connection: sa.Connection, statement: sa.Select[Any]) -> tuple[list[Row[Any]], bool]:
    """The first rows of a statement with at most PAGE_BYTES of text, and whether rows were left out.

    The page contains at least one row if there is one. Rows that are left out are not fetched.
    """
    page: list[Row[Any]] = []
    size = 0
    with connection.execute(statement, execution_options={"yield_per": _ROWS_AT_ONCE}) as rows:
        for row in rows:
            size += size_of(row)
            if size > PAGE_BYTES and page:
                return page, True
            page.append(row)
    return page, False


def size_of(row: Row[Any]) -> int:
    """The approximate bytes of a row's texts and JSON values."""
    texts = (value for value in row if isinstance(value, str | dict | list))
    return sum(len(text if isinstance(text, str) else str(text)) for text in texts)


def missing(table: type[Table], row_id: str) -> NotFoundError:
    """The error for rows that do not exist, and for rows of other owners."""
    return NotFoundError(f"{table.__tablename__} {row_id!r} does not exist")


def locked_ids(connection: sa.Connection, table: Owned, *where: sa.ColumnElement[bool]) -> list[str]:
    """The ids of the rows `where`, locked in the order of their ids. SQLite locks the whole database instead.

    Other transactions may still insert rows that refer to the locked rows.
    """
    column = col(table.id)
    locked = sa.select(column).where(*where).order_by(column).with_for_update(key_share=True)
    return list(connection.execute(locked).scalars())


def in_id_order(table: type[Table], *where: sa.SQLColumnExpression[bool]) -> sa.ColumnElement[bool]:
    """The filter for the rows `where` in an UPDATE, which locks them in the order of their ids (or of other keys).

    Otherwise Postgres locks them in the order of its plan, and two such statements may wait for each other.
    """
    (column,) = Table.metadata.tables[str(table.__tablename__)].primary_key
    return column.in_(sa.select(column).where(*where).order_by(column).with_for_update())


def insert_if_absent(connection: sa.Connection, table: type[Table], values: Mapping[str, object]) -> bool:
    """Insert a row unless it violates a unique constraint of the table. Returns whether it was inserted.

    Waits for a concurrent insert of the same key, so if False is returned, the other row is visible.
    """
    return connection.execute(_insert(table, tuple(values)), dict(values)).first() is not None


def columns(table: type[Table]) -> tuple[sa.Column[Any], ...]:
    """All columns of a table, for RETURNING."""
    return tuple(Table.metadata.tables[str(table.__tablename__)].c)


def as_view(view: type[T], row: Row[Any], prefix: str = "") -> T:
    """The row as the dataclass `view`. Each field is a column, in a joined row with `prefix` before its name."""
    if view not in _VIEWS:
        kinds = get_type_hints(view)
        _VIEWS[view] = [(field.name, _converted(kinds[field.name])) for field in fields(view)]  # type: ignore[arg-type]
    values = ((name, kind, getattr(row, prefix + name)) for name, kind in _VIEWS[view])
    return view(**{name: value if kind is None else kind(value) for name, kind, value in values})


_VIEWS: dict[type[Any], list[tuple[str, type[Any] | None]]] = {}  # fields of each view, and their types


def _converted(kind: Any) -> type[Any] | None:
    if getattr(kind, "__origin__", None) is tuple:
        return tuple
    return kind if isinstance(kind, type) and issubclass(kind, StrEnum) else None


@cache
def _select_owned(table: type[Table], lock: RowLock | None) -> sa.Select[Any]:
    owned = sa.select(table).where(is_owned(table))
    if lock is None:
        return owned
    return owned.with_for_update(read=True) if lock == "share" else owned.with_for_update(key_share=True)


@cache
def _insert(table: type[Table], names: tuple[str, ...]) -> sa.TextualSelect:
    # Text, because SQLAlchemy 2.0 recompiles its ON CONFLICT in every execution: 1 ms per submit.
    columns = Table.metadata.tables[str(table.__tablename__)].c
    sql = f"INSERT INTO {table.__tablename__} ({', '.join(names)}) VALUES (:{', :'.join(names)})"
    typed = [sa.bindparam(name, type_=columns[name].type) for name in names]
    return (
        sa.text(f"{sql} ON CONFLICT DO NOTHING RETURNING 1 AS inserted").bindparams(*typed).columns(inserted=sa.Integer)
    )
