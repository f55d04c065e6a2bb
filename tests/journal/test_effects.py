"""Answers and their effects: the first answer wins, and the end of a model answers all its waiting requests."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta

import pytest
from tests.journal.conftest import checkpoint

from tinkerflow.backend.core.errors import StateLostError, UserError
from tinkerflow.backend.journal import (
    ModelEnded,
    ModelLive,
    ModelState,
    NewSampler,
    Outcome,
    SamplerLoaded,
    SamplerOpened,
    SamplerState,
    StepMade,
)


def test_the_first_answer_wins_with_its_effects(scene):
    model = scene.model()
    request = scene.submit(model, 1)
    (pending,) = scene.journal.requests.ready(model)
    assert scene.journal.results.finish([pending.done(b"first", "proto", StepMade(model, 1))]) == [request]
    assert scene.journal.results.finish([pending.failed("second", None, StepMade(model, 99))]) == []
    assert scene.journal.results.get(request, "local").result == b"first"
    assert scene.journal.models.get(model, "local").step == 1


def test_first_of_two_answers_in_one_call_wins(scene):
    model = scene.model()
    request = scene.submit(model, 1)
    (pending,) = scene.journal.requests.ready(model)
    assert scene.journal.results.finish([pending.done(b"a", "json"), pending.done(b"b", "json")]) == [request]
    assert scene.journal.results.get(request, "local").result == b"a"


def test_concurrent_answers_have_one_winner(scene):
    model = scene.model()
    for seq in range(1, 9):
        scene.submit(model, seq)
    run = scene.journal.requests.ready(model)
    start = threading.Barrier(4)

    def answer(who: int) -> list[str]:
        start.wait()
        order = run if who % 2 else run[::-1]
        return scene.journal.results.finish([p.done(b"%d" % who, "json", StepMade(model, p.seq_id)) for p in order])

    with ThreadPoolExecutor(4) as threads:
        won = [request for ids in threads.map(answer, range(4)) for request in ids]
    assert sorted(won) == sorted(p.id for p in run)
    assert scene.journal.models.get(model, "local").next_seq == 9


def test_outcomes_and_effects_are_written_atomically(scene):
    model = scene.model()
    pending = scene.taken(model, 1)
    orphan = SamplerOpened(NewSampler("sess-none:sample:0", "sess-none", "local", "tiny"))  # no such session
    with pytest.raises(Exception, match=r"(?i)foreign key"):
        scene.journal.results.finish([pending.done(b"r", "json", StepMade(model, 7), orphan)])
    assert scene.journal.results.get(pending.id, "local") is None
    view = scene.journal.models.get(model, "local")
    assert (view.step, view.next_seq) == (0, 1)
    assert scene.ready(model) == [1]


def test_created_model_has_the_step_and_spec_of_its_checkpoint(scene):
    model = scene.model(live=False)
    (creation,) = scene.journal.requests.ready(model)
    scene.journal.results.finish([creation.done(b"{}", "json", ModelLive(model, step=12, rank=4, train_unembed=False))])
    view = scene.journal.models.get(model, "local")
    assert (view.state, view.step, view.rank, view.train_attn, view.train_unembed) == ("live", 12, 4, True, False)


def test_failed_creation_fails_the_requests_behind_it(scene):
    model = scene.model(live=False)
    behind = scene.submit(model, 1)
    (creation, _) = scene.journal.requests.ready(model)
    scene.journal.results.finish([creation.failed(UserError("base model 'x': unknown"))])
    view = scene.journal.models.get(model, "local")
    assert (view.state, view.detail) == (ModelState.FAILED, "base model 'x': unknown")
    answer = scene.journal.results.get(behind, "local")
    assert answer.error == f"model {model} was never created: base model 'x': unknown"
    assert answer.category == "user"


def test_ending_a_model_fails_its_pending_requests_and_no_others(scene):
    session = scene.session()
    model, other = scene.model(session, 0), scene.model(session, 1)
    for seq in (1, 2, 4):
        scene.submit(model, seq)
    survivor = scene.submit(other, 1)
    (first, _) = scene.journal.requests.ready(model)
    scene.journal.results.finish(
        [first.failed(StateLostError("gone"), None, ModelEnded(model, ModelState.LOST, "rank 1 died"))]
    )
    assert scene.journal.queue.pending_models() == [other]
    assert scene.journal.results.get(survivor, "local") is None
    assert scene.journal.results.get(first.id, "local").error == "gone"


def test_submit_during_the_end_of_its_model_is_always_answered(scene):
    session = scene.session()
    for n in range(6):
        model = scene.model(session, n)
        pending = scene.taken(model, 1)
        start = threading.Barrier(5)

        def submit(seq: int, model: str = model, start: threading.Barrier = start) -> str:
            start.wait()
            return scene.submit(model, seq)

        with ThreadPoolExecutor(5) as threads:
            ids = [threads.submit(submit, seq) for seq in range(2, 6)]
            start.wait()
            scene.journal.results.finish([pending.done(b"", "json", ModelEnded(model, ModelState.UNLOADED, "bye"))])
            stored = [future.result() for future in ids]
        assert scene.journal.results.finished(stored) == set(stored)


def test_a_sampler_opened_while_the_first_key_was_created_belongs_to_its_project(scene):
    session = scene.session()
    save = scene.taken(scene.model(session), 1)
    opened = NewSampler(f"{session}:sample:0", session, save.owner, "tiny", snapshot_id="snap-1")
    scene.journal.keys.create("first", "team")
    scene.journal.results.finish([save.done(b"{}", "json", SamplerOpened(opened))])
    assert scene.journal.samplers.get(opened.id, "team").snapshot_id == "snap-1"


def test_samplers_open_load_and_end(scene):
    session = scene.session()
    model = scene.model(session)
    save = scene.taken(model, 1)
    opened = NewSampler(f"{session}:sample:0", session, "local", "tiny", snapshot_id="snap-1")
    scene.journal.results.finish([save.done(b"{}", "json", SamplerOpened(opened))])
    view = scene.journal.samplers.get(opened.id, "local")
    assert (view.state, view.snapshot_id, view.model_path) == (SamplerState.LIVE, "snap-1", None)
    first, second = scene.sample(opened.id, 0), scene.sample(opened.id, 1)
    (one, _) = scene.journal.requests.pending_samples(10)
    scene.journal.results.finish([one.done(b"s", "proto", SamplerLoaded(opened.id, "snap-2"))])
    assert scene.journal.samplers.get(opened.id, "local").snapshot_id == "snap-2"
    assert scene.journal.samplers.unused_snapshots(["snap-1", "snap-2"]) == {"snap-1"}
    (two,) = scene.journal.requests.pending_samples(10)
    third = scene.sample(opened.id, 2)
    scene.journal.results.finish([two.done(b"t", "proto")])
    scene.journal.sessions.finish(session, "local", "the client went")
    assert scene.journal.results.get(first, "local").result == b"s"
    assert scene.journal.results.get(second, "local").result == b"t"
    assert "the client went" in scene.journal.results.get(third, "local").error
    assert scene.journal.results.get(third, "local").category == "user"
    assert scene.journal.samplers.unused_snapshots(["snap-2"]) == {"snap-2"}
    assert "is closed" in scene.journal.results.get(scene.sample(opened.id, 3), "local").error


def test_a_checkpoint_saved_again_replaces_its_row(scene, clock):
    model = scene.model()
    for seq in (1, 2):
        scene.submit(model, seq)
    one, two = scene.journal.requests.ready(model)
    saved = checkpoint(f"tinker://{model}/weights/one", step=3, size_bytes=2**40)
    scene.journal.results.finish([one.done(b"{}", "json", saved)])
    scene.journal.checkpoints.delete(saved.path, "local")
    clock.advance(5)
    expires = clock.now() + timedelta(hours=1)
    scene.journal.results.finish([two.done(b"{}", "json", replace(saved, step=9, expires_at=expires))])
    view = scene.journal.checkpoints.get(saved.path, "local")
    assert (view.step, view.size_bytes, view.created_at, view.expires_at) == (9, 2**40, clock.now(), expires)


def test_outcomes_are_a_result_or_an_error_with_its_category():
    for fields in (
        {},
        {"result": b"", "error": "x", "category": "user"},
        {"error": "x"},
        {"result": b"", "category": "user"},
    ):
        with pytest.raises(ValueError, match="outcome of req-1"):
            Outcome("req-1", **fields)


def test_finish_is_three_statements_and_its_effects(scene, statements):
    model = scene.model()
    sampler = scene.sampler(scene.session())
    for seq in range(1, 31):
        scene.submit(model, seq)
        scene.sample(sampler, seq)
    run = scene.journal.requests.ready(model)
    with statements() as made:
        scene.journal.results.finish([pending.done(b"", "json") for pending in run[:29]])
    assert len(made) == 3
    with statements() as made:
        scene.journal.results.finish([run[29].done(b"", "json", StepMade(model, 1))])
    assert len(made) == 4
    with statements() as made:
        scene.journal.results.finish(
            [pending.done(b"", "proto") for pending in scene.journal.requests.pending_samples(31)]
        )
    assert len(made) == 4  # the read, the sampler's number, and two to finish
