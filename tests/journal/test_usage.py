"""Usage: counted once, with the answer. Stored bytes follow from the lifetimes of checkpoints."""

from __future__ import annotations

from dataclasses import astuple
from datetime import timedelta

import pytest
from tests.journal.conftest import checkpoint

from tinkerflow.backend.journal import ModelEnded, ModelState, UsageKind, Used
from tinkerflow.backend.journal.results import hour_of
from tinkerflow.backend.journal.usage import HOUR


def used(session, kind=UsageKind.TRAINING, quantity=10):
    return Used(session, "tiny", kind, quantity)


def amounts(journal, owner, start):
    return [(row.kind, row.quantity) for row in journal.usage.hourly(owner, start, start + 10 * HOUR)]


def test_usage_is_added_up_by_hour_and_only_with_the_first_answer(scene, clock):
    session, start = scene.session(), hour_of(clock.now())
    model = scene.model(session)
    for seq in (1, 2):
        scene.submit(model, seq)
    first, second = scene.journal.requests.ready(model)
    scene.journal.results.finish([one.done(b"", "json", used(session)) for one in (first, second)])
    scene.journal.results.finish([first.done(b"", "json", used(session))])
    assert amounts(scene.journal, "local", start) == [("training", 20)]
    scene.submit(model, 3)
    clock.advance(3600)
    (third,) = scene.journal.requests.ready(model)
    scene.journal.results.finish(
        [third.done(b"", "json", used(session, quantity=5), used(session, UsageKind.SAMPLE, 7))]
    )
    assert amounts(scene.journal, "local", start) == [("training", 20), ("sample", 7), ("training", 5)]
    assert amounts(scene.journal, "local", start + HOUR) == [("sample", 7), ("training", 5)]
    assert amounts(scene.journal, "stranger", start) == []
    assert amounts(scene.journal, None, start) == amounts(scene.journal, "local", start)
    assert [row.project for row in scene.journal.usage.hourly("local", start, start + HOUR)] == ["local"]


def test_usage_is_separate_by_session_base_model_and_owner(scene, clock, as_owner):
    start, other = hour_of(clock.now()), as_owner("stranger")
    sessions = [scene.session(), scene.session(), other.session()]
    for owned, session, base, quantity in zip((scene, scene, other), sessions, ("a", "b", "a"), (1, 2, 4), strict=True):
        model = owned.model(session)
        request = owned.taken(model, 1)
        owned.journal.results.finish([request.done(b"", "json", Used(session, base, UsageKind.SAMPLE, quantity))])

    def found(owner, end):
        return {(row.session_id, row.base_model, row.quantity) for row in scene.journal.usage.hourly(owner, start, end)}

    first, second, foreign = ((s, b, q) for s, b, q in zip(sessions, "aba", (1, 2, 4), strict=True))
    assert found("local", start + HOUR) == {first, second}
    assert found("stranger", start + HOUR) == {foreign}
    assert found(None, start + HOUR) == {first, second, foreign}
    assert found(None, start) == set()  # the end is exclusive


def test_stored_bytes_are_counted_from_saving_to_deleting(scene, clock):
    session, start = scene.session(), hour_of(clock.now())
    model = scene.model(session)
    save = scene.taken(model, 1)
    path = f"tinker://{model}/weights/a"
    row = checkpoint(path, size_bytes=1000)
    clock.advance(1800)
    scene.journal.results.finish([save.done(b"", "json", row, used(session, UsageKind.CHECKPOINT, 1))])
    clock.advance(2 * 3600)
    (now,) = scene.journal.usage.stored_now("local")
    assert (now.project, now.checkpoints, now.size_bytes) == ("local", 1, 1000)
    assert scene.journal.usage.stored_now("local", "other") == scene.journal.usage.stored_now("stranger") == []
    scene.journal.checkpoints.delete(path, "local")
    clock.advance(5 * 3600)
    hours = scene.journal.usage.stored("local", start, start + 10 * HOUR)
    assert [(one.bucket_start - start, one.byte_hours) for one in hours] == [
        (timedelta(hours=0), pytest.approx(500)),
        (timedelta(hours=1), pytest.approx(1000)),
        (timedelta(hours=2), pytest.approx(500)),
    ]
    assert scene.journal.usage.stored_now("local") == []


def test_failed_requests_use_nothing(scene, clock):
    session = scene.session()
    model = scene.model(session)
    request = scene.taken(model, 1)
    scene.journal.results.finish([request.failed("no", "user", ModelEnded(model, ModelState.LOST, "gone"))])
    assert amounts(scene.journal, None, hour_of(clock.now())) == []


def test_totals_are_added_up_by_hour_project_and_kind(scene, clock, as_owner):
    start = hour_of(clock.now())
    for one in (scene, scene, as_owner("other")):
        session = one.session()
        model = one.model(session)
        request = one.taken(model, 1)
        one.journal.results.finish([request.done(b"", "proto", used(session, UsageKind.TRAINING, 10))])
    found = scene.journal.usage.totals(None, start, start + HOUR)
    assert [(one.bucket_start, one.owner, one.project, one.kind, one.quantity) for one in found] == [
        (start, "local", "local", UsageKind.TRAINING, 20),
        (start, "other", "other", UsageKind.TRAINING, 10),
    ]
    assert scene.journal.usage.totals("other", start, start + HOUR) == found[1:]
    assert scene.journal.usage.totals(None, start + HOUR, start + 2 * HOUR) == []


def test_present_storage_is_added_up_by_project_and_key(scene, as_owner):
    (key, _), stranger = scene.journal.keys.create("ann", "local"), as_owner("stranger")
    stored = [(scene, "a", ""), (scene, "a", ""), (scene, "a", key.id), (scene, None, ""), (stranger, None, "")]
    for owned, label, key_id in stored:
        model = owned.model(owned.session(project_id=label, key_id=key_id))
        saved = checkpoint(f"tinker://{model}/weights/a", owner=owned.owner)
        owned.journal.results.finish([owned.taken(model, 1).done(b"", "json", saved)])
    mine = [("a", "", None, 2, 200), ("a", key.id, "ann", 1, 100), ("local", "", None, 1, 100)]
    read = scene.journal.usage.stored_now
    assert [astuple(row) for row in read("local")] == mine
    assert [astuple(row) for row in read(None)] == [*mine, ("stranger", "", None, 1, 100)]
    assert [astuple(row) for row in read(None, "a")] == mine[:2]
