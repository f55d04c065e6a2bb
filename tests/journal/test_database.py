"""Transactions of concurrent processes, durability after a kill, and database URLs."""

from __future__ import annotations

import shutil
import sqlite3
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from datetime import datetime
from errno import ENOSPC
from pathlib import Path

import psycopg
import pytest
import sqlalchemy as sa
from sqlalchemy.engine import make_url
from tests.journal.conftest import checkpoint

from tinkerflow.backend.core.disk import sqlite_url
from tinkerflow.backend.core.errors import JournalBusyError, ServerError, UserError
from tinkerflow.backend.journal import AWAY, Journal, ModelState, NewSession, Retention, database, migrate
from tinkerflow.backend.journal.database import Database, driver_url, refusal
from tinkerflow.backend.journal.notify_postgres import PostgresTransport

WRITER = """
import sys
from tinkerflow.backend.journal import Journal, Kind, NewRequest
journal = Journal.open(sys.argv[1])
for n in range(150):
    seq_id = 2 * n + 1 + int(sys.argv[3])
    request = NewRequest(Kind.FORWARD, "local", b"x" * 1000, str(n), model_id=sys.argv[2], seq_id=seq_id)
    journal.requests.submit(request)
journal.close()
"""


def test_two_processes_write_at_once_and_lose_nothing(scene, url):
    model = scene.model()
    arguments = [sys.executable, "-W", "error", "-c", WRITER, url, model]
    writers = [subprocess.Popen([*arguments, parity]) for parity in ("0", "1")]
    executed: list[int | None] = []
    while any(writer.poll() is None for writer in writers):
        executed += [pending.seq_id for pending in scene.execute(model)]
    assert [writer.returncode for writer in writers] == [0, 0]
    while run := scene.execute(model):
        executed += [pending.seq_id for pending in run]
    assert executed == list(range(1, 301))


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_acknowledged_submits_and_answers_survive_a_power_cut(scene, tmp_path, monkeypatch):
    (cut := tmp_path / "cut").mkdir()
    flushed = []

    def copy(log: Path) -> None:
        """Keep the files as a power cut would leave them: only flushed bytes are on disk."""
        flushed.append(log)
        for file in (tmp_path / "journal.db", log):
            shutil.copy(file, cut / file.name)

    monkeypatch.setattr(database, "flush", copy)
    model = scene.model()
    request = scene.submit(model, 1)
    with closing(Journal.open(f"sqlite:///{cut}/journal.db")) as again:
        assert [pending.id for pending in again.requests.ready(model)] == [request]
    scene.execute(model)
    with closing(Journal.open(f"sqlite:///{cut}/journal.db")) as again:
        assert again.results.get(request, "local").result == b"result"
    many = len(flushed)
    scene.journal.results.get(request, "local")
    scene.journal.leases.beat()
    assert len(flushed) == many, "commits that need not survive cost no flush"


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_an_answer_whose_flush_fails_is_written_again(scene, monkeypatch):
    pending = scene.taken(scene.model(), 1)
    errors = iter((OSError(ENOSPC, "No space left on device"),))
    flush = database.flush

    def fail_once(log: Path) -> None:
        for error in errors:
            raise error
        flush(log)

    monkeypatch.setattr(database, "flush", fail_once)
    with pytest.raises(AWAY, match="not on disk yet"):
        scene.journal.results.finish([pending.done(b"1", "json")])
    scene.journal.results.finish([pending.done(b"1", "json")])
    assert scene.journal.results.get(pending.id, None).result == b"1"


def test_threads_share_a_flush(tmp_path, monkeypatch):
    flushes, drawn, first, go = [], [], threading.Event(), threading.Event()

    def flush(file: Path) -> None:
        flushes.append(file)
        first.set()
        assert go.wait(60)

    monkeypatch.setattr(database, "flush", flush)
    shared = database._SharedFlush(tmp_path / "log")
    shared._numbers = iter(lambda: drawn.append(None) or len(drawn), None)
    with ThreadPoolExecutor(8) as threads:
        waiting = [threads.submit(shared.flush)]
        assert first.wait(60)
        waiting += [threads.submit(shared.flush) for _ in range(7)]
        while len(drawn) < 9:  # until all have drawn their numbers, and the first flush has begun
            time.sleep(0.001)
        go.set()
        for one in waiting:
            one.result()
    assert len(flushes) == 2


def test_acknowledged_submits_survive_sigkill(scene, url):
    model = scene.model()
    code = WRITER.replace(
        "journal.close()", "print('stored', flush=True)\nimport os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    )
    killed = subprocess.run(
        [sys.executable, "-c", code, url, model, "0"], stdout=subprocess.PIPE, text=True, check=False
    )
    assert (killed.returncode, killed.stdout) == (-9, "stored\n")
    again = Journal.open(url)
    assert again.requests.ready(model)[0].seq_id == 1
    with sa.create_engine(driver_url(url)).connect() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM request WHERE seq_id > 0")).scalar() == 150
    connection.engine.dispose()
    again.close()


def test_writer_without_a_turn_raises_an_error(journal_template, monkeypatch, tmp_path):
    path = tmp_path / "busy.db"
    path.write_bytes(journal_template.read_bytes())
    monkeypatch.setattr(database, "BUSY_SECONDS", 0.05)
    holder, waiter = Database(f"sqlite:///{path}"), Journal.open(f"sqlite:///{path}")
    with holder.write(), pytest.raises(ServerError, match=r"no write lock within 0.05 s"):
        waiter.sessions.create(NewSession("local", "0"))
    assert waiter.sessions.create(NewSession("local", "0")).startswith("sess-")
    holder.close()
    waiter.close()


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_server_that_became_read_only_is_away_until_the_next_connection(scene, url):
    name = make_url(url).database
    with psycopg.connect(url, autocommit=True) as server:
        server.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
        others = "datname = current_database() AND pid <> pg_backend_pid()"
        server.execute(f"SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity WHERE {others}")
        with pytest.raises(AWAY):  # the pool's connection
            scene.session()
        with pytest.raises(JournalBusyError, match="takes no writes at present"):
            scene.session()
        server.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    assert scene.journal.sessions.get(scene.session(), None).state == "active"


@pytest.mark.parametrize("sql", ["SELECT * FROM missing", "SELECT missing FROM session", "SELECTT 1"])
def test_a_wrong_statement_is_no_outage(url, sql):
    opened = Database(url)
    for transaction in (opened.read, opened.write):
        with pytest.raises(sa.exc.ProgrammingError) as raised, transaction() as connection:
            connection.execute(sa.text(sql))
        assert not isinstance(raised.value, AWAY)
    opened.close()


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_a_value_that_no_index_can_hold_is_no_outage(url):
    opened = Database(url)
    with pytest.raises(sa.exc.ProgrammingError, match="index row"), opened.write() as connection:
        connection.execute(sa.text("CREATE TEMP TABLE long (text text PRIMARY KEY) ON COMMIT DROP"))
        random = "(SELECT string_agg(md5(n::text), '') FROM generate_series(1, 500) n)"
        connection.execute(sa.text(f"INSERT INTO long VALUES ({random})"))
    opened.close()


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (lambda url: url.set(database="missing"), r'\(database "missing" does not exist\)'),
        (lambda url: url.set(username="nobody"), r'\(role "nobody" does not exist\)'),
    ],
)
def test_a_url_that_the_server_refuses_names_its_setting(postgres_bare, change, why):
    url = change(make_url(postgres_bare)).render_as_string(hide_password=False)
    for use in (Journal.open, migrate):
        with pytest.raises(UserError, match=f"^database_url: the server refuses .*{why}: correct the user, .*_URL$"):
            use(url)


def test_refusals_of_a_url_are_told_from_outages():
    to = 'connection failed: connection to server at "::1", port 5432 failed: '
    password = 'FATAL:  password authentication failed for user "me"'
    hba = 'FATAL:  no pg_hba.conf entry for host "::1", user "me", database "x", no encryption'
    both = f"{to}{password}\nMultiple connection attempts failed. All failures were:\n- host: 'a': {to}{{}}\n- 'b': "
    assert refusal(to + password) == 'password authentication failed for user "me"'
    assert refusal(f"{to}fe_sendauth: no password supplied") == "no password supplied"
    assert refusal(to + hba) == hba.removeprefix("FATAL:  ")
    assert refusal(both.format(password) + to + password) == 'password authentication failed for user "me"'
    assert refusal(both.format("Connection refused") + to + password) is None
    assert refusal(f"{to}Connection refused\n\tIs the server running on that host?") is None
    assert refusal(f'{to}FATAL:  database "x" is not currently accepting connections') is None
    assert refusal(f'{to}FATAL:  too many connections for role "me"') is None


def test_readers_do_not_wait_for_a_writer(scene, url):
    session = scene.session()
    holder = Database(url)
    with holder.write() as connection:
        connection.execute(sa.text("UPDATE session SET detail = 'x'"))
        assert scene.journal.sessions.get(session, "local").detail is None
    holder.close()


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
@pytest.mark.parametrize("change", ["expire", "retire", "delete run", "archive", "overwrite"])
def test_changes_of_several_rows_lock_them_in_the_order_of_their_keys(scene, save, clock, url, change):
    """Otherwise two changes of the same rows may wait for each other until Postgres ends one of them."""
    session = scene.session()
    last, first = scene.model(session, 1), scene.model(session)
    paths = [save(first, name, ttl=ttl if change == "expire" else None) for name, ttl in (("b", 1), ("a", 9), ("z", 9))]
    clock.advance(10)
    if change == "overwrite":
        for seq in (4, 5):
            scene.submit(first, seq)
    saves = [
        one.done(b"{}", "json", checkpoint(path, attempt="later"))
        for one, path in zip(scene.journal.requests.ready(first), paths, strict=False)
    ]
    if change == "delete run":
        scene.journal.sessions.finish(session, "local")
        scene.journal.models.end(first, ModelState.UNLOADED, "over")
    call = {
        "expire": scene.journal.upkeep.delete_expired,
        "retire": lambda: scene.journal.upkeep.delete_retired(Retention(1)),
        "delete run": lambda: scene.journal.run_deletions.delete([first], "local"),
        "archive": lambda: scene.journal.run_table.archive([last, first], "local"),
        "overwrite": lambda: scene.journal.results.finish(saves),
    }[change]
    row, keys = ("model WHERE id", (first, last)) if change == "archive" else ("checkpoint WHERE path", paths[1::-1])
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with (
        ThreadPoolExecutor(1) as threads,
        psycopg.connect(url) as holder,
        psycopg.connect(url, autocommit=True) as other,
    ):
        holder.execute(f"SELECT 1 FROM {row} = %s FOR UPDATE", [keys[0]])
        changed = threads.submit(call)
        while other.execute(waiting).fetchone() is None:
            assert not changed.done()
        other.execute(f"SELECT 1 FROM {row} = %s FOR UPDATE NOWAIT", [keys[1]])
        holder.rollback()
        changed.result()


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_the_end_of_a_silent_session_blocks_no_rows_that_refer_to_it(scene, clock, url):
    """A sample locks its sampler before its rows refer to the session, and the end of a session locks both in turn."""
    session = scene.session()
    scene.sampler(session)
    clock.advance(100)
    waiting = "SELECT 1 FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with (
        ThreadPoolExecutor(1) as threads,
        psycopg.connect(url) as sample,
        psycopg.connect(url, autocommit=True) as other,
    ):
        sample.execute("SELECT 1 FROM sampler FOR NO KEY UPDATE")
        ended = threads.submit(scene.journal.sessions.expire, 10)
        while other.execute(waiting).fetchone() is None:
            assert not ended.done()
        sample.execute("SELECT 1 FROM session FOR KEY SHARE")  # as a foreign key of a new request or of its usage
        sample.rollback()
        assert ended.result() == [session]


@pytest.mark.parametrize("opened", ["before", "after"])
def test_a_connection_that_is_used_during_or_after_the_close_is_closed(url, opened):
    """Python 3.13 warns about others. The threads of a stopped engine use such connections."""
    database = Database(url)
    if opened == "after":
        database.close()
    with database.read() as connection:
        driver = connection.connection.driver_connection
        database.close()
        assert connection.scalar(sa.text("SELECT 1")) == 1
    with pytest.raises((sqlite3.ProgrammingError, psycopg.OperationalError), match="closed"):
        driver.execute("SELECT 1")


def test_an_exception_rolls_back(url):
    opened = Database(url)
    with pytest.raises(RuntimeError), opened.write() as connection:
        values = "(name, card, registered_at) VALUES ('x', '{}', '2026-01-01 00:00:00')"
        connection.execute(sa.text(f"INSERT INTO base_model {values}"))
        raise RuntimeError
    with opened.read() as connection:
        assert connection.execute(sa.text("SELECT count(*) FROM base_model")).scalar() == 0
    opened.close()


def test_urls():
    assert driver_url("postgresql://u:p@h/d").drivername == "postgresql+psycopg"
    assert driver_url("postgres://u:p@h/d").drivername == "postgresql+psycopg"
    assert driver_url("sqlite:////x/a#b %20/y.db?timeout=3").database == "/x/a#b %20/y.db"
    assert make_url(sqlite_url(Path("/x/a#b %20/y.db"), "sqlite+aiosqlite")).database == "/x/a#b %20/y.db"
    with pytest.raises(ValueError, match="needs a file"):
        Database("sqlite://")


def test_connections_to_postgres_notice_a_lost_host_in_seconds(postgres_bare):
    """By default, the system waits 15 minutes for a packet to arrive, and two hours for an answer."""
    opened, transport = Database(f"{postgres_bare}&keepalives_idle=7"), PostgresTransport(postgres_bare)
    listening = transport._connect_listening()
    with opened.read() as connection, closing(listening):
        for one, idle in ((connection.connection.driver_connection, 7), (listening, 10)):
            found = one.info.get_parameters()
            assert int(found["keepalives_idle"]) == idle
            assert int(found["keepalives_interval"]) * int(found["keepalives_count"]) == 10
            assert (found["connect_timeout"], found["tcp_user_timeout"]) == ("10", "20000")
    opened.close()


def test_a_process_that_is_lost_in_a_transaction_keeps_no_lock(postgres_migrated):
    opened = Database(postgres_migrated)
    with opened.read() as connection:
        assert connection.execute(sa.text("SHOW idle_in_transaction_session_timeout")).scalar() == "15s"
    lock = sa.text("LOCK TABLE base_model IN EXCLUSIVE MODE")
    with pytest.raises(JournalBusyError, match="ended a transaction that paused for too long"), opened.write() as lost:
        lost.execute(sa.text("SET idle_in_transaction_session_timeout = 50"))
        lost.execute(lock)
        with opened.write() as connection:
            connection.execute(lock)  # waits for the end of the session
        lost.execute(sa.text("SELECT 1"))
    opened.close()


def test_naive_datetimes_are_refused(url):
    from tinkerflow.backend.journal.database import UtcDateTime

    opened = Database(url)
    statement = sa.text("SELECT :when").bindparams(sa.bindparam("when", type_=UtcDateTime()))
    with pytest.raises(sa.exc.StatementError, match="has no time zone"), opened.read() as connection:
        connection.execute(statement, {"when": datetime(2026, 1, 1)})
    opened.close()
