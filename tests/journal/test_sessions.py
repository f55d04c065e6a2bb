"""Sessions: heartbeat, finish, expiry, and the ends of their models and samplers."""

from __future__ import annotations

import pytest

from tinkerflow.backend.core.errors import NotFoundError, StateLostError
from tinkerflow.backend.journal import (
    ModelEnded,
    ModelState,
    NewSession,
    SamplerState,
    SessionFailure,
    SessionQuery,
    SessionState,
)


def test_session_keeps_metadata_of_its_client(scene, clock):
    new = NewSession("local", "0.38.0", ("a", "b"), {"n": 1, "deep": {"x": [1]}}, "proj-1", "my run")
    session = scene.journal.sessions.create(new)
    view = scene.journal.sessions.get(session, "local")
    assert session.startswith("sess-")
    assert (view.owner, view.tags, view.user_metadata) == ("local", ("a", "b"), {"n": 1, "deep": {"x": [1]}})
    assert (view.project_id, view.display_name, view.state) == ("proj-1", "my run", SessionState.ACTIVE)
    assert view.created_at == view.last_seen_at == clock.now()
    with pytest.raises(NotFoundError):
        scene.journal.sessions.get(session, "stranger")


def test_heartbeats_keep_a_session_and_do_not_revive_it(scene, clock):
    session = scene.session()
    for _ in range(3):
        clock.advance(200)
        assert scene.journal.sessions.heartbeat(session, "local") is SessionState.ACTIVE
        assert scene.journal.sessions.expire(300) == []
    clock.advance(301)
    assert scene.journal.sessions.expire(300) == [session]
    assert scene.journal.sessions.expire(300) == []
    seen = scene.journal.sessions.get(session, "local").last_seen_at
    assert scene.journal.sessions.heartbeat(session, "local") is SessionState.EXPIRED
    assert scene.journal.sessions.get(session, "local").last_seen_at == seen
    for owner, name in (("stranger", session), ("local", "sess-none")):
        with pytest.raises(NotFoundError):
            scene.journal.sessions.heartbeat(name, owner)


def test_training_requests_keep_a_session_alive_without_heartbeats(scene, clock):
    session = scene.session()
    model = scene.model(session)
    clock.advance(200)
    scene.submit(model, 1)
    clock.advance(200)
    assert scene.journal.sessions.expire(300) == []
    clock.advance(101)
    assert scene.journal.sessions.expire(300) == [session]


def test_silent_sessions_end_one_by_one_while_others_write(scene, clock, monkeypatch):
    """One transaction for 2,000 silent sessions held the write lock for a minute, so that all other writes failed."""
    first, second = sorted((scene.session(), scene.session()))
    clock.advance(301)
    ended = []

    def hear(*topics):
        ended.extend(topics)
        scene.journal.sessions.heartbeat(second, "local")

    monkeypatch.setattr(scene.journal.sessions, "_publish", hear)
    assert scene.journal.sessions.expire(300) == [first]
    assert ended == [f"session:{first}"]
    assert scene.journal.sessions.get(second, "local").state is SessionState.ACTIVE


def test_samplers_close_with_their_session_and_models_wait_for_their_unload(scene, clock):
    session, other = scene.session(), scene.session()
    model, sampler, foreign = scene.model(session), scene.sampler(session), scene.sampler(other)
    training, sample, elsewhere = scene.submit(model, 1), scene.sample(sampler, 0), scene.sample(foreign, 0)
    assert scene.journal.models.abandoned() == []
    scene.journal.sessions.finish(session, "local", "done")
    clock.advance(1)
    scene.journal.sessions.finish(session, "local", "again")
    view = scene.journal.sessions.get(session, "local")
    assert (view.state, view.detail) == (SessionState.FINISHED, "done")
    assert scene.journal.samplers.of_session(session)[0].state is SamplerState.CLOSED
    assert "done" in scene.journal.results.get(sample, "local").error
    assert scene.journal.results.get(elsewhere, "local") is None
    assert scene.journal.results.get(training, "local") is None
    assert scene.journal.models.abandoned() == [model]
    scene.journal.models.request_unload(model, "its session is finished")
    assert scene.journal.models.abandoned() == []
    *_, unload = scene.journal.requests.ready(model)
    scene.journal.results.finish(
        [unload.done(b"{}", "json", ModelEnded(model, ModelState.UNLOADED, "its session is finished"))]
    )
    assert scene.journal.models.get(model, "local").state is ModelState.UNLOADED
    assert "its session is finished" in scene.journal.results.get(training, "local").error


def test_end_of_a_session_takes_as_many_statements_with_many_samplers(scene, statements):
    """A transaction with some statements for each of thousands of samplers held the write lock for minutes."""
    made = []
    for count in (1, 9):
        session = scene.session()
        samplers = [scene.sampler(session, n) for n in range(count)]
        waiting = [scene.sample(sampler, 0) for sampler in samplers]
        with statements() as each:
            scene.journal.sessions.finish(session, "local", "done")
        made.append(len(each))
        found = [scene.journal.results.get(request, "local").error for request in waiting]
        why = f"session {session} is finished: done"
        assert found == [f"sampler {sampler} is closed: {why}" for sampler in samplers]
        assert {view.state for view in scene.journal.samplers.of_session(session)} == {SamplerState.CLOSED}
        assert all(number == 1 for number in scene.journal.results.last_completions(samplers).values())
    assert made[0] == made[1]


def test_only_the_owner_finishes_a_session(scene):
    session = scene.session()
    with pytest.raises(NotFoundError):
        scene.journal.sessions.finish(session, "stranger", None)
    assert scene.journal.sessions.get(session, "local").state is SessionState.ACTIVE


def test_a_heartbeat_is_one_statement(scene, statements):
    session = scene.session()
    with statements() as made:
        scene.journal.sessions.heartbeat(session, "local")
    assert len(made) == 1


def expired(scene, clock, session):
    clock.advance(301)
    assert scene.journal.sessions.expire(300) == [session]
    return scene.journal.sessions.get(session, "local").failure


def test_an_expired_session_failed_when_its_last_request_did(scene, clock):
    session = scene.session()
    model = scene.model(session)
    scene.submit(model, 1, error="wrong")
    scene.submit(model, 2)
    sample = scene.sample(scene.sampler(session), 0)
    clock.advance(1)
    scene.execute(model)
    (pending,) = scene.journal.requests.pending_samples(1)
    scene.journal.results.finish([pending.failed("no such token", "user")])
    assert expired(scene, clock, session) == SessionFailure("user", "request", sample, "sample", "no such token")


def test_failure_before_the_last_request_is_not_the_reason_of_the_session(scene, clock):
    session = scene.session()
    model = scene.model(session)
    scene.submit(model, 1, error="wrong")
    scene.submit(model, 2)
    scene.execute(model)
    assert expired(scene, clock, session) is None


def test_lost_model_is_the_reason_of_its_failed_session(scene, clock):
    session = scene.session()
    model = scene.model(session)
    pending = scene.taken(model, 1)
    scene.journal.results.finish(
        [pending.failed(StateLostError("gone"), None, ModelEnded(model, ModelState.LOST, "the group died"))]
    )
    assert expired(scene, clock, session) == SessionFailure("server", "training_run", model, None, "the group died")


def test_sessions_are_found_by_failed_and_cancelled_status(scene, clock):
    failed, silent = scene.session(), scene.session()
    scene.submit(scene.model(failed), 1, error="wrong")
    clock.advance(301)
    scene.journal.sessions.expire(300)

    def found(status):
        sessions, more = scene.journal.sessions.search(SessionQuery(statuses=((status, None),)), "local")
        assert not more
        return [one.session.id for one in sessions]

    assert (found("failed"), found("cancelled"), found("active")) == ([failed], [silent], [])


def test_pages_of_sessions_made_at_once_do_not_overlap(scene):
    made = {scene.session() for _ in range(5)}
    pages = [scene.journal.sessions.ids("local", limit=2, offset=offset) for offset in (0, 2, 4)]
    assert [len(page) for page in pages] == [2, 2, 1]
    assert {one for page in pages for one in page} == made
    found, after = [], None
    for _ in range(3):
        page, more = scene.journal.sessions.search(SessionQuery(limit=2, after=after), "local")
        found += [one.session.id for one in page]
        after = (page[-1].session.created_at, page[-1].session.id)
    assert not more
    assert found == [one for page in pages for one in page]
