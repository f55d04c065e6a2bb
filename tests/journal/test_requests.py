"""Submitting requests: replays, conflicts, races, and requests that are stored as failed."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tinkerflow.backend.core.errors import ConflictError, NotFoundError
from tinkerflow.backend.journal import Kind, ModelEnded, ModelState, NewModel, NewRequest, SessionState


def test_resubmitted_request_keeps_its_stored_id(scene):
    model = scene.model()
    first = scene.submit(model, 1)
    assert scene.submit(model, 1) == first
    scene.execute(model)
    assert scene.submit(model, 1) == first
    assert scene.journal.results.get(first, "local").result == b"result"


def test_different_content_under_a_used_seq_id_is_a_conflict(scene):
    model = scene.model()
    scene.submit(model, 1, "a")
    with pytest.raises(ConflictError, match=f"seq_id 1 of model {model} was used before for another request"):
        scene.submit(model, 1, "b")
    optim = NewRequest(Kind.OPTIM_STEP, "local", b"{}", "a", model_id=model, seq_id=1)
    with pytest.raises(ConflictError, match="forward_backward"):
        scene.journal.requests.submit(optim)


def test_concurrent_submits_of_one_request_make_one_row(scene):
    model = scene.model()
    start = threading.Barrier(8)

    def submit(content: str) -> str:
        start.wait()
        try:
            return scene.submit(model, 1, content)
        except ConflictError:
            return "conflict"

    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(submit, ["a", "b"] * 4))
    accepted = {i for i in ids if i != "conflict"}
    assert len(accepted) == 1
    assert ids.count("conflict") == 4
    assert [p.id for p in scene.journal.requests.ready(model)] == list(accepted)


def test_concurrent_submits_of_many_requests_keep_all(scene):
    model = scene.model()
    with ThreadPoolExecutor(8) as threads:
        ids = list(threads.map(lambda seq: scene.submit(model, seq), [*range(1, 41)] * 2))
    assert ids[:40] == ids[40:]
    assert [p.id for p in scene.journal.requests.ready(model)] == ids[:40]


def test_creation_is_replayed_by_session_and_number(scene):
    session = scene.session()
    model = f"{session}:train:0"
    new = NewModel(model, session, "local", "tiny", rank=8, seed=2**62, user_metadata={"renderer": "qwen3"})
    first = scene.journal.models.create(new, scene.creation(model))
    assert scene.journal.models.create(new, scene.creation(model)) == first
    with pytest.raises(ConflictError):
        scene.journal.models.create(new, scene.creation(model, "other"))
    view = scene.journal.models.get(model, "local")
    assert (view.state, view.rank, view.seed, view.next_seq) == (ModelState.CREATING, 8, 2**62, 0)
    assert view.user_metadata == {"renderer": "qwen3"}
    assert view.created_at.utcoffset().total_seconds() == 0


def test_concurrent_creations_make_one_model(scene):
    session = scene.session()
    model = f"{session}:train:0"
    new = NewModel(model, session, "local", "tiny", rank=8)
    with ThreadPoolExecutor(8) as threads:
        ids = set(threads.map(lambda _: scene.journal.models.create(new, scene.creation(model)), range(8)))
    assert len(ids) == 1


@pytest.mark.parametrize("state", [ModelState.LOST, ModelState.UNLOADED, ModelState.FAILED])
def test_request_for_an_ended_model_is_stored_as_failed_with_its_seq_id(scene, state):
    model = scene.model()
    running = scene.taken(model, 1)
    scene.journal.results.finish([running.done(b"", "proto", ModelEnded(model, state, "the reason"))])
    late = scene.submit(model, 2)
    assert scene.submit(model, 2) == late
    answer = scene.journal.results.get(late, "local")
    assert model in answer.error
    assert "the reason" in answer.error
    assert answer.category == ("server" if state is ModelState.LOST else "user")
    with pytest.raises(ConflictError):
        scene.submit(model, 2, "other")
    assert scene.journal.queue.pending_models() == []


def test_request_in_a_finished_session_is_stored_as_failed(scene):
    session = scene.session()
    model, sampler = scene.model(session), scene.sampler(session)
    scene.journal.sessions.finish(session, "local", "success")
    for request in (scene.submit(model, 1), scene.sample(sampler, 0)):
        answer = scene.journal.results.get(request, "local")
        assert f"session {session} is finished: success" in answer.error
        assert answer.category == "user"
    late_model = scene.model(session, 1, live=False)
    assert scene.journal.models.get(late_model, "local").state is ModelState.FAILED
    assert scene.journal.sessions.get(session, "local").state is SessionState.FINISHED


def test_request_known_to_be_invalid_is_stored_as_failed_and_blocks_no_other(scene):
    model = scene.model()
    scene.submit(model, 3)
    bad = scene.submit(model, 2, error="data[0] is empty: needs at least one token")
    assert scene.ready(model) == []
    scene.submit(model, 1)
    assert scene.ready(model) == [1, 3]
    assert scene.submit(model, 2, error="data[0] is empty: needs at least one token") == bad
    assert scene.journal.results.get(bad, "local").error.startswith("data[0] is empty")
    scene.execute(model)
    assert scene.journal.models.get(model, "local").next_seq == 4


def test_creation_known_to_be_invalid_fails_its_model(scene):
    session = scene.session()
    model = f"{session}:train:0"
    wrong = NewRequest(Kind.CREATE_MODEL, "local", b"", "c", model_id=model, seq_id=0, error="rank 0: must be >= 1")
    request = scene.journal.models.create(NewModel(model, session, "local", "tiny", rank=0), wrong)
    assert scene.journal.results.get(request, "local").error == "rank 0: must be >= 1"
    assert scene.journal.models.get(model, "local").state is ModelState.FAILED
    assert scene.journal.queue.pending_models() == []


def test_request_for_a_skipped_gap_is_too_late(scene, clock):
    model = scene.model()
    scene.submit(model, 2)
    clock.advance(61)
    (gap,) = scene.journal.queue.gaps(60)
    assert scene.journal.queue.skip_gap(gap)
    late = scene.journal.results.get(scene.submit(model, 1), "local")
    assert "seq_id 1" in late.error
    assert "too late" in late.error


def test_samples_are_replayed_by_sampler_and_int64_seq_id(scene):
    session = scene.session()
    one, other = scene.sampler(session, 0), scene.sampler(session, 1)
    big = 3_000_000_000_000
    first = scene.sample(one, big)
    assert scene.sample(one, big) == first
    assert scene.sample(other, big) != first
    with pytest.raises(ConflictError, match=f"of sampler {one}"):
        scene.sample(one, big, "other")


def test_submits_for_missing_or_foreign_objects_are_refused(scene, as_owner):
    session = scene.session()
    model, sampler = scene.model(session), scene.sampler(session)
    stranger = as_owner("stranger")
    for submit in (
        lambda: stranger.submit(model, 1),
        lambda: scene.submit("sess-none:train:0", 1),
        lambda: stranger.sample(sampler, 0),
        lambda: scene.sample("sess-none:sample:0", 0),
        lambda: stranger.model(session, 1),
        lambda: stranger.sampler(session, 1),
    ):
        with pytest.raises(NotFoundError, match="does not exist"):
            submit()
    assert scene.ready(model) == []


def test_a_request_without_an_address_is_a_programming_error(scene):
    with pytest.raises(ValueError, match="exactly one of model_id and sampler_id"):
        scene.journal.requests.submit(NewRequest(Kind.SAMPLE, "local", b"", "h"))


def test_unload_runs_after_executable_requests_and_ends_the_model(scene):
    model = scene.model()
    stays = scene.submit(model, 1)
    stranded = scene.submit(model, 3)
    unload = scene.journal.models.request_unload(model, "session finished")
    assert scene.journal.models.request_unload(model, "again") == unload
    assert scene.journal.queue.pending_models() == [model]
    run = scene.journal.requests.ready(model)
    assert [(p.kind, p.id) for p in run] == [(Kind.FORWARD_BACKWARD, stays), (Kind.UNLOAD, unload)]
    scene.journal.results.finish([run[0].done(b"r", "proto")])
    assert scene.ready(model) == [None]
    scene.journal.results.finish(
        [run[1].done(b"{}", "json", ModelEnded(model, ModelState.UNLOADED, "session finished"))]
    )
    assert "session finished" in scene.journal.results.get(stranded, "local").error
    assert scene.journal.models.request_unload(model, "once more") is None
    assert scene.journal.models.get(model, "local").next_seq == 2


def test_submit_is_two_statements_and_three_for_a_replay(scene, statements):
    model, sampler = scene.model(), scene.sampler(scene.session())
    with statements() as made:
        scene.submit(model, 1)
    assert len(made) == 2
    with statements() as made:
        scene.submit(model, 1)
    assert len(made) == 3
    with statements() as made:
        scene.sample(sampler, 0)
    assert len(made) == 2
