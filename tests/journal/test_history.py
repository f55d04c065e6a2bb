"""Requests of runs with a history stay in the journal until a segment in the store contains them."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal import HistoryRules, ModelState, StepMeasured
from tinkerflow.backend.journal import history as module
from tinkerflow.backend.spec.history import PastRequest, Segment, digest

DAY = 86400


def waiting(scene, run, **more):
    return [request.seq_id for request in scene.journal.histories.unarchived(run, **more)]


def segment(first, last, size=10):
    return Segment(f"{first:012d}-x", first, last, size)


def test_requests_wait_for_their_segment_even_after_their_results_expired(scene, clock):
    run, plain = scene.model(history=True), scene.model()
    for model in (run, plain):
        for seq in (1, 2):
            scene.submit(model, seq)
        scene.execute(model)
    scene.submit(run, 4)  # 3 has not arrived
    clock.advance(2 * DAY)
    assert scene.journal.results.expire(DAY) == 3, "those of the run without a history"
    assert scene.journal.histories.due() == [run]
    assert waiting(scene, plain) == []
    creation, first, _ = scene.journal.histories.unarchived(run)
    at, result_hash = creation.answered_at, digest(b"{}")
    assert creation == PastRequest(0, "create_model", creation.request_id, b"{}", None, result_hash, at)
    assert clock.now() - at == timedelta(days=2)
    assert (first.seq_id, first.payload, first.result_hash) == (1, b"payload 1", digest(b"result"))
    assert waiting(scene, run, after=1) == [2] and waiting(scene, run, most_bytes=1) == [0]
    assert scene.journal.histories.record_segment(run, segment(0, 1))
    assert waiting(scene, run) == [2]
    assert scene.journal.results.expire(DAY) == 2
    assert scene.journal.histories.segments(run, "local") == [segment(0, 1)]
    with pytest.raises(NotFoundError, match="does not exist"):
        scene.journal.histories.segments(run, "other")


def test_unanswered_save_holds_back_later_history_requests(scene):
    run = scene.model(history=True)
    for seq in (1, 2, 3):
        scene.submit(run, seq)
    first, _, third = scene.journal.requests.ready(run)
    scene.journal.results.finish([one.done(b"r", "proto") for one in (first, third)])
    assert waiting(scene, run) == [0, 1]


def test_failures_of_a_model_that_has_ended_belong_to_its_history(scene):
    run = scene.model(history=True)
    for seq in (1, 2):
        scene.submit(run, seq)
    (first, _) = scene.journal.requests.ready(run)
    scene.journal.results.finish([first.done(b"r", "proto")])
    scene.journal.models.end(run, ModelState.LOST, "its memory")
    assert scene.journal.histories.due() == [run], "at once"
    *_, last = scene.journal.histories.unarchived(run)
    assert (last.seq_id, last.result_hash) == (2, "") and "was lost: its memory" in str(last.error)


def test_segment_is_due_after_many_requests_or_a_time_limit(scene, clock, monkeypatch):
    monkeypatch.setattr(module, "_DUE_REQUESTS", 3)
    run = scene.model(history=True)
    scene.submit(run, 1)
    scene.execute(run)
    assert scene.journal.histories.due() == []
    scene.submit(run, 2)
    scene.execute(run)
    assert scene.journal.histories.due() == [run]
    other = scene.model(history=True)
    assert scene.journal.histories.due() == [run]
    clock.advance(module._DUE_SECONDS + 1)
    assert set(scene.journal.histories.due()) == {run, other}


def test_old_and_surplus_histories_are_deleted_and_live_ones_last(scene, clock, as_owner):
    runs = []
    for owner in ("local", "local", "local", "other"):
        runs.append(as_owner(owner).model(history=True))
        assert scene.journal.histories.record_segment(runs[-1], segment(0, 0, 100))
        clock.advance(DAY)
    *runs, elsewhere = runs
    for run in runs[:2]:
        scene.journal.models.end(run, ModelState.LOST, "")
    histories = scene.journal.histories
    assert histories.to_delete(HistoryRules(0, 0)) == histories.to_delete(HistoryRules(30, 300)) == []
    assert histories.to_delete(HistoryRules(3.5, 0)) == runs[:1]
    assert histories.to_delete(HistoryRules(0, 200)) == runs[:1]
    assert histories.to_delete(HistoryRules(0, 99)) == [*runs, elsewhere], "the live ones after the ended ones"
    assert histories.to_delete(HistoryRules(0, 99), limit=1) == [elsewhere], "even if earlier ones cannot be deleted"
    histories.end(runs[2])
    assert not histories.record_segment(runs[2], replace(segment(1, 1), name="late")), "it was deleted meanwhile"
    histories.forget(runs[2])
    assert histories.segments(runs[2]) == []
    scene.submit(runs[2], 1)
    scene.execute(runs[2])
    assert waiting(scene, runs[2]) == [], "it has no history any more"


def test_steps_are_found_by_their_requests(scene):
    run = scene.model()
    for seq, step in ((2, 1), (4, 2)):
        scene.submit(run, seq - 1)
        scene.submit(run, seq)
        first, second = scene.journal.requests.ready(run)
        measured = StepMeasured(run, seq, step, 1.0, 0.1)
        scene.journal.results.finish([first.done(b"r", "proto"), second.done(b"{}", "json", measured)])
    assert scene.journal.histories.steps(run) == {2: 1, 4: 2}
