"""Reading a sampler's answers by a cursor, with concurrent writers and readers: each answer is read exactly once."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import sqlalchemy as sa

from tinkerflow.backend.core.errors import NotFoundError, UserError
from tinkerflow.backend.journal import Completions, Journal, Outcome
from tinkerflow.backend.journal.requests import CANCELLED
from tinkerflow.backend.journal.results import FIRST_SHOWN, LARGEST_SHOWN
from tinkerflow.backend.journal.topics import CLONE_BLOCK


@pytest.fixture
def sampler(scene):
    return scene.sampler(scene.session())


def finish_all(journal, *, one_by_one=False):
    pending = journal.requests.pending_samples(1000)
    for some in [[one] for one in pending] if one_by_one else [pending]:
        journal.results.finish([one.done(b"12345", "proto") for one in some])
    return [one.id for one in pending]


def after(scene, sampler, cursor, clone=0, **more):
    return scene.journal.results.completions(sampler, "local", clone=clone, after=cursor, **more)


def test_a_cursor_gives_each_answer_once_in_order(scene, sampler):
    assert after(scene, sampler, 0) == Completions((), 0)
    first = [scene.sample(sampler, seq) for seq in range(3)]
    finish_all(scene.journal, one_by_one=True)
    page = after(scene, sampler, 0)
    assert [row.request_id for row in page.rows] == first
    assert {(row.done, row.size) for row in page.rows} == {(True, 5)}
    assert after(scene, sampler, page.cursor).rows == ()
    assert after(scene, sampler, 0) == page  # a lost response is requested again
    second = scene.sample(sampler, 3)
    (pending,) = scene.journal.requests.pending_samples(10)
    scene.journal.results.finish([pending.failed("no", "user")])
    page = after(scene, sampler, page.cursor)
    assert [(row.request_id, row.done, row.size) for row in page.rows] == [(second, False, 0)]


def test_clones_have_separate_results_and_cursors(scene, sampler):
    mine, other = scene.sample(sampler, 5), scene.sample(sampler, 3 * CLONE_BLOCK + 5)
    last = scene.sample(sampler, 4 * CLONE_BLOCK - 1)
    finish_all(scene.journal)
    assert [row.request_id for row in after(scene, sampler, 0).rows] == [mine]
    assert {row.request_id for row in after(scene, sampler, 0, clone=3).rows} == {other, last}
    assert after(scene, sampler, 0, clone=1).rows == ()
    assert after(scene, sampler, 0, clone=1).cursor == after(scene, sampler, 0).cursor > 0


def test_cursor_survives_the_process_and_is_separate_per_sampler(scene, sampler, url):
    other = scene.sampler(scene.session())
    for seq in range(3):
        scene.sample(sampler, seq)
    finish_all(scene.journal, one_by_one=True)
    cursor = after(scene, sampler, 0).cursor
    later = scene.sample(sampler, 9)
    finish_all(scene.journal)
    reopened = Journal.open(url)
    page = reopened.results.completions(sampler, "local", clone=0, after=cursor)
    reopened.close()
    assert [row.request_id for row in page.rows] == [later]
    assert after(scene, other, 0).cursor == 0
    # a cursor may be ahead of a journal that was restored from a backup: the reader must not wait
    assert len(after(scene, sampler, page.cursor + 100).rows) == 4


def test_cancelled_failed_and_finished_results_are_all_listed(scene, as_owner):
    session = scene.session()
    sampler, other = scene.sampler(session), scene.sampler(session, 1)
    ids = [scene.sample(sampler, 0)]
    scene.journal.requests.cancel(ids[0], "local")
    ids.append(scene.sample(sampler, 2))
    scene.sample(other, 0)
    scene.journal.sessions.finish(session, "local")
    ids.append(scene.sample(sampler, 3))  # stored as failed, because its session has ended
    assert [row.request_id for row in after(scene, sampler, 0).rows] == ids
    assert len(after(scene, other, 0).rows) == 1
    with pytest.raises(NotFoundError):
        as_owner("them").journal.results.completions(sampler, "them", clone=0, after=0)


def test_reader_among_many_writers_sees_each_result_once(scene, sampler, url):
    """On Postgres the writers' transactions overlap: numbers must become visible in their order."""
    ids = {scene.sample(sampler, seq) for seq in range(60)}
    pending = scene.journal.requests.pending_samples(100)
    journals = [Journal.open(url) for _ in range(3)]

    def write(n: int) -> None:
        for one in pending[n::3]:
            journals[n].results.finish([one.done(b"x", "proto")])

    seen: list[str] = []
    with ThreadPoolExecutor(3) as threads:
        writing = [threads.submit(write, n) for n in range(3)]
        cursor, ended = 0, False
        while not ended:
            ended = all(one.done() for one in writing)
            page = after(scene, sampler, cursor)
            seen += [row.request_id for row in page.rows]
            cursor = page.cursor
        for one in writing:
            one.result()
    for journal in journals:
        journal.close()
    assert len(seen) == len(ids) == 60
    assert set(seen) == ids


@pytest.mark.parametrize("url", ["postgres"], indirect=True)
def test_cursor_does_not_pass_an_open_transaction(scene, sampler, url):
    """The later writer waits for the earlier one, so a reader between the two cannot overtake it."""
    first, second = scene.sample(sampler, 0), scene.sample(sampler, 1)
    engine = sa.create_engine(url.replace("postgresql://", "postgresql+psycopg://"))
    by_id = {one.id: one for one in scene.journal.requests.pending_samples(10)}
    with engine.connect() as connection:
        open_transaction = connection.begin()
        taken = sa.text(
            "UPDATE sampler SET last_completion = last_completion + 1 WHERE id = :id RETURNING last_completion"
        )
        assert connection.execute(taken, {"id": sampler}).scalar_one() == 1
        writer = threading.Thread(target=lambda: scene.journal.results.finish([by_id[second].done(b"2", "proto")]))
        writer.start()
        writer.join(0.3)
        assert writer.is_alive()
        assert after(scene, sampler, 0) == Completions((), 0)
        connection.execute(
            sa.text("UPDATE request SET state = 'done', result = 'x', completion = 1 WHERE id = :id"), {"id": first}
        )
        open_transaction.commit()
    writer.join(10)
    engine.dispose()
    assert [row.request_id for row in after(scene, sampler, 0).rows] == [first, second]


def test_long_lists_are_paged_without_splitting_a_transaction(scene, sampler):
    ids = []
    for count in (1, 1, 5, 2, 1):
        ids += [scene.sample(sampler, len(ids) + n) for n in range(count)]
        finish_all(scene.journal)
    seen, sizes, cursor = [], [], 0
    while (page := after(scene, sampler, cursor, page=3)).rows:
        seen += [row.request_id for row in page.rows]
        sizes.append(len(page.rows))
        cursor = page.cursor
    assert sorted(seen) == sorted(ids)
    assert sizes == [2, 5, 3]


def test_idle_poll_is_one_statement_and_a_page_two(scene, sampler, statements):
    with statements() as made:
        after(scene, sampler, 0)
    assert len(made) == 1
    scene.sample(sampler, 0)
    finish_all(scene.journal)
    with statements() as made:
        after(scene, sampler, 0)
    assert len(made) == 2
    with statements() as made:
        assert scene.journal.results.last_completions([sampler, "none"]) == {sampler: 1}
    assert len(made) == 1


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
def test_result_queries_use_the_index(scene, sampler, url, statements):
    scene.sample(sampler, 0)
    finish_all(scene.journal)
    with statements() as made:
        after(scene, sampler, 0)
    engine = sa.create_engine(url)
    with engine.connect() as connection:
        plan = list(connection.exec_driver_sql("EXPLAIN QUERY PLAN " + made[1], (1,) * made[1].count("?")))
    engine.dispose()
    assert "ix_request_completions" in plan[0].detail, plan
    assert not any("SCAN" in row.detail for row in plan), plan


def test_outcome_without_a_sampler_is_refused(scene, sampler):
    request = scene.sample(sampler, 0)
    with pytest.raises(ValueError, match="sampler_id is None"):
        scene.journal.results.finish([Outcome(request, result=b"")])
    assert scene.journal.results.get(request, "local") is None


def test_read_and_acknowledged_results_are_dropped(scene, sampler):
    read, unread, clones = (scene.sample(sampler, seq) for seq in (FIRST_SHOWN, FIRST_SHOWN + 1, CLONE_BLOCK))
    finish_all(scene.journal)
    for request in (read, clones):
        scene.journal.results.get(request, "local")
    assert scene.journal.results.acknowledge(sampler, "local", [read, unread, clones, "req-none"], clone=0) == 1
    assert scene.journal.results.acknowledge(sampler, "local", [read], clone=0) == 0
    gone = scene.journal.results.get(read, "local")
    assert (gone.result, gone.category) == (None, "user") and "acknowledged" in gone.error
    for kept in (unread, clones):
        assert scene.journal.results.get(kept, "local").result == b"12345"
    with pytest.raises(NotFoundError):
        scene.journal.results.acknowledge(sampler, "them", [unread], clone=0)


def test_first_samples_of_a_sampler_are_kept_but_not_those_of_its_copies(scene, sampler):
    asked = [scene.sample(sampler, seq) for seq in (*range(FIRST_SHOWN + 1), CLONE_BLOCK)]
    large, *_ = pending = scene.journal.requests.pending_samples(100)
    scene.journal.results.finish([one.done(b"1" * (LARGEST_SHOWN if one is large else 5), "proto") for one in pending])
    for request in asked:
        scene.journal.results.get(request, "local")
    for clone, dropped in ((0, 2), (1, 1)):
        assert scene.journal.results.acknowledge(sampler, "local", asked, clone=clone) == dropped
    gone = [request for request in asked if scene.journal.results.get(request, "local").result is None]
    assert gone == [large.id, *asked[FIRST_SHOWN:]]


def test_reading_only_the_size_does_not_count_as_reading_the_result(scene, sampler):
    request = scene.sample(sampler, 0)
    assert scene.journal.results.get(request, "local", at_most=4) is None
    finish_all(scene.journal)
    told = scene.journal.results.get(request, "local", at_most=4)
    assert (told.result, told.error, told.size) == (None, None, 5)
    assert scene.journal.results.acknowledge(sampler, "local", [request], clone=0) == 0
    assert scene.journal.results.get(request, "local", at_most=5).result == b"12345"


def test_copies_get_separate_numbers(scene, sampler, url):
    with ThreadPoolExecutor(4) as threads:
        numbers = list(threads.map(lambda _: scene.journal.samplers.join(sampler, "local"), range(12)))
    assert sorted(numbers) == list(range(1, 13))
    reopened = Journal.open(url)
    assert reopened.samplers.join(sampler, "local") == 13
    reopened.close()
    for wrong in (("none", "local"), (sampler, "them")):
        with pytest.raises(NotFoundError):
            scene.journal.samplers.join(*wrong)


def test_a_cancelled_sample_fails_and_nothing_else_can_be_cancelled(scene, sampler):
    request = scene.sample(sampler, 0)
    with pytest.raises(NotFoundError):
        scene.journal.requests.cancel(request, "them")
    assert scene.journal.requests.cancel(request, "local")
    failed = scene.journal.results.get(request, "local")
    assert (failed.error, failed.category) == (CANCELLED, "user")
    assert not scene.journal.requests.cancel(request, "local")
    assert scene.journal.requests.pending_samples(10) == []
    answered = scene.sample(sampler, 1)
    finish_all(scene.journal)
    assert not scene.journal.requests.cancel(answered, "local")
    assert scene.journal.results.get(answered, "local").result == b"12345"
    model = scene.model()
    training = scene.submit(model, 1)
    with pytest.raises(UserError, match="only samples can be cancelled"):
        scene.journal.requests.cancel(training, "local")
    assert scene.ready(model) == [1]
