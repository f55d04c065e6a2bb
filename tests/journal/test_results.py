"""Reading answers: owners, re-reading, expiry."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import psycopg
import pytest

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.journal import Kind, ModelState, results


def test_pending_then_answered_and_re_readable(scene):
    model = scene.model()
    request = scene.submit(model, 1)
    assert scene.journal.results.get(request, "local") is None
    scene.execute(model)
    first = scene.journal.results.get(request, "local")
    assert (first.request_id, first.result) == (request, b"result")
    assert (first.result_type, first.error, first.category) == ("proto", None, None)
    assert (first.kind, first.again) == (Kind.FORWARD_BACKWARD, False)
    assert scene.journal.results.get(request, "local") == replace(first, again=True)
    assert scene.journal.results.get(request, None) == replace(first, again=True)


def test_failures_keep_text_and_category(scene):
    model = scene.model()
    request = scene.submit(model, 1)
    (pending,) = scene.journal.requests.ready(model)
    scene.journal.results.finish([pending.failed(UserError("learning_rate nan: must be finite"))])
    answer = scene.journal.results.get(request, "local")
    assert (answer.result, answer.error, answer.category) == (None, "learning_rate nan: must be finite", "user")


def test_foreign_and_missing_results_look_equal(scene):
    request = scene.submit(scene.model(), 1)
    texts = set()
    for request_id, owner in ((request, "stranger"), ("req-none", "local")):
        with pytest.raises(NotFoundError) as error:
            scene.journal.results.get(request_id, owner)
        texts.add(str(error.value).replace(request_id, "ID"))
    assert texts == {"request 'ID' does not exist"}


def test_results_expire_after_they_were_read_or_answered(scene, clock):
    model = scene.model()
    read, unread, failed = (scene.submit(model, seq) for seq in (1, 2, 3))
    waiting = scene.submit(model, 5)
    run = scene.journal.requests.ready(model)
    scene.journal.results.finish([run[0].done(b"1", "json"), run[1].done(b"2", "json"), run[2].failed("broken")])
    clock.advance(50)
    scene.journal.results.get(read, "local")
    clock.advance(51)
    assert scene.journal.results.expire(100) == 2 + 1  # unread, failed, and the model's creation
    assert scene.journal.results.get(read, "local").result == b"1"
    gone = scene.journal.results.get(unread, "local")
    assert gone.result is None
    assert "the result expired" in gone.error
    assert gone.category == "user"
    assert scene.journal.results.get(failed, "local").error == "broken"
    clock.advance(50)
    assert scene.journal.results.expire(100) == 1
    assert scene.journal.results.expire(100) == 0
    assert "expired" in scene.journal.results.get(read, "local").error
    assert scene.submit(model, 1) == read
    assert scene.journal.results.get(waiting, "local") is None


def test_expiry_is_bounded_per_call(scene, clock):
    model = scene.model()
    for seq in range(1, 10):
        scene.submit(model, seq)
    scene.execute(model)
    clock.advance(10)
    bites = [scene.journal.results.expire(5, limit=4) for _ in range(4)]
    assert bites == [4, 4, 2, 0]


def test_results_expire_in_transactions_of_limited_bytes(scene, clock, statements, monkeypatch):
    """SQLite drops about 100 MB per second, and no one else can write meanwhile."""
    monkeypatch.setattr(results, "_DROPPED_BYTES", 32)
    model = scene.model()
    for seq in range(1, 9):
        scene.submit(model, seq)  # with its result 15 bytes
    scene.execute(model)
    clock.advance(10)
    with statements() as made:
        assert scene.journal.results.expire(5) == 9
    assert sum(one.startswith("UPDATE request") for one in made) == 4
    sampler = scene.sampler(scene.session())
    ids = [scene.sample(sampler, seq) for seq in range(4, 12)]  # each 2 bytes, with its result 12
    scene.journal.results.finish([one.done(b"0123456789", "json") for one in scene.journal.requests.pending_samples(9)])
    for request in ids:
        scene.journal.results.get(request, "local")
    with statements() as made:
        assert scene.journal.results.acknowledge(sampler, "local", ids, clone=0) == 8
    assert sum(one.startswith("UPDATE request") for one in made) == 4


def test_result_that_is_read_while_others_expire_is_kept(scene, clock, monkeypatch):
    model = scene.model()
    first, second = (scene.submit(model, seq) for seq in (1, 2))
    scene.execute(model)
    clock.advance(10)
    monkeypatch.setattr(results, "_DROPPED_BYTES", 1)
    begin = scene.journal.results._write

    def write():
        monkeypatch.setattr(scene.journal.results, "_write", begin)
        scene.journal.results.get(second, "local")
        return begin()

    monkeypatch.setattr(scene.journal.results, "_write", write)
    assert scene.journal.results.expire(5) == 2
    assert scene.journal.results.get(first, "local").result is None
    assert scene.journal.results.get(second, "local").result == b"result"


def test_finished_returns_the_answered_ids(scene):
    model = scene.model()
    ids = [scene.submit(model, seq) for seq in range(1, 4)]
    scene.execute(model, limit=2)
    assert scene.journal.results.finished([*ids, "req-none"]) == set(ids[:2])
    assert scene.journal.results.finished([]) == set()


def test_statements_to_read_a_result(scene, statements):
    model = scene.model()
    request = scene.submit(model, 1)
    with statements() as made:
        scene.journal.results.get(request, "local")
    assert len(made) == 1
    scene.execute(model)
    with statements() as made:
        scene.journal.results.get(request, "local")
    assert len(made) == 2
    with statements() as made:
        scene.journal.results.get(request, "local")
        scene.journal.results.finished([request])
    assert len(made) == 2


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
@pytest.mark.parametrize("change", ["acknowledge", "expire", "forget"])
def test_answers_are_locked_in_the_order_of_their_ids(scene, clock, url, change):
    """A change waits for the first of its rows while it holds no other, so two changes never wait for each other."""
    model = scene.model()
    sampler = scene.sampler(scene.journal.models.get(model, None).session_id)
    if change == "forget":
        ids = [scene.submit(model, seq) for seq in range(1, 7)]
        rows = scene.journal.requests.ready(model)
    else:
        ids = [scene.sample(sampler, seq) for seq in range(4, 10)]
        rows = scene.journal.requests.pending_samples(10)
    scene.journal.results.finish([replace(row.done(b"{}", "json"), replays=change == "forget") for row in rows])
    for request in ids:
        scene.journal.results.get(request, "local")
    clock.advance(10)
    changes = {
        "acknowledge": lambda: scene.journal.results.acknowledge(sampler, "local", ids, clone=0),
        "expire": lambda: scene.journal.results.expire(5),
        "forget": lambda: scene.journal.models.end(model, ModelState.UNLOADED, "over"),
    }
    waiting = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with psycopg.connect(url) as first, psycopg.connect(url, autocommit=True) as other, ThreadPoolExecutor(1) as thread:
        first.execute("SELECT id FROM request WHERE id = %s FOR UPDATE", [min(ids)])
        changed = thread.submit(changes[change])
        while not other.execute(waiting).fetchone()[0]:
            assert not changed.done()
        free = other.execute("SELECT id FROM request WHERE id = ANY(%s) FOR UPDATE SKIP LOCKED", [ids]).fetchall()
        first.rollback()
        changed.result()
    assert len(free) == len(ids) - 1
