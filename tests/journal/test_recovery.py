"""Replays, the payloads that are kept for them, and superfluous snapshots."""

from __future__ import annotations

from dataclasses import replace

from tinkerflow.backend.journal import (
    Kind,
    ModelEnded,
    ModelState,
    NewRequest,
    NewSampler,
    SamplerOpened,
    SnapshotTaken,
)


def executed(scene, model, *seqs):
    """Submit and answer operations that change the model."""
    for seq in seqs:
        scene.submit(model, seq)
    scene.journal.results.finish(
        [replace(one.done(b"r", "proto"), replays=True) for one in scene.journal.requests.ready(model)]
    )


def replayed(scene, model, after=0):
    return [one.request.seq_id for one in scene.journal.recovery.executed(model, after, 100)]


def taken(model, seq, **more):
    return SnapshotTaken(f"tinker://{model}/recovery/{seq}{more.get('snapshot_id', '')}", model, seq, 1, 10, **more)


def test_two_snapshots_replace_the_requests_that_both_contain(scene):
    model, journal = scene.model(), scene.journal.recovery
    executed(scene, model, 1, 2, 3, 4, 5)
    assert replayed(scene, model) == [1, 2, 3, 4, 5]
    assert journal.snapshot_taken(taken(model, 2))
    assert replayed(scene, model) == [1, 2, 3, 4, 5], "it is the only one, and it may turn out to be damaged"
    assert journal.count_executed(model, 2) == 3
    assert journal.snapshot_taken(taken(model, 4))
    assert replayed(scene, model) == [3, 4, 5]
    assert journal.snapshot_taken(taken(model, 3)), "a slow one, that is recorded late"
    assert replayed(scene, model) == [4, 5]
    assert [view.seq_id for view in journal.snapshots(model)] == [4, 3, 2]
    assert [view.seq_id for view in journal.restorable(model)] == [4, 3]
    assert not journal.snapshot_taken(taken(model, 6)), "request 6 is not answered: it would be executed twice"


def test_replay_passes_an_overtaken_save_and_no_snapshot_does(scene):
    model, journal = scene.model(), scene.journal.recovery
    for seq in (1, 2, 3, 4):
        scene.submit(model, seq)
    first, save, third, _ = scene.journal.requests.ready(model)
    scene.journal.results.finish([replace(one.done(b"r", "proto"), replays=True) for one in (first, third)])
    assert replayed(scene, model) == [1, 2, 3], "and not 4, which nobody has overtaken"
    assert [one.answered_at is None for one in journal.executed(model, 0, 10)] == [False, True, False]
    assert journal.count_executed(model, 0) == 2
    assert not journal.snapshot_taken(taken(model, 3))
    assert journal.snapshot_taken(taken(model, 1))
    assert journal.snapshot_taken(taken(model, 3, snapshot_id="sampled"))
    scene.journal.results.finish([save.done(b"", "json")])
    assert replayed(scene, model) == [1, 3]
    assert journal.snapshot_taken(taken(model, 3))


def published(scene, session, model, seq):
    """Submit and answer an unnamed save. Returns its id."""
    asked = replace(scene.operation(model, seq), kind=Kind.SAVE_FOR_SAMPLER, payload=b"{}")
    request = scene.journal.requests.submit(asked)
    (pending,) = scene.journal.requests.ready(model)
    opened = SamplerOpened(NewSampler(f"sampler {seq}", session, scene.owner, "tiny", snapshot_id=request))
    scene.journal.results.finish([replace(pending.done(b"{}", "json", opened), replays=True)])
    return request


def test_replay_passes_an_unstored_publication_while_a_sampler_uses_it(scene):
    session = scene.session()
    model, journal = scene.model(session), scene.journal.recovery
    executed(scene, model, 1)
    request = published(scene, session, model, 2)
    executed(scene, model, 3)
    assert scene.journal.requests.ready(model) == [] and replayed(scene, model) == [1, 2, 3]
    assert journal.unstored_models() == [model] and journal.is_unstored(request)
    assert [(one.id, one.answered) for one in journal.unstored(model)] == [(request, True)]
    assert journal.snapshot_taken(taken(model, 1)) and not journal.snapshot_taken(taken(model, 3))
    assert journal.snapshot_taken(taken(model, 2, snapshot_id=request)), "now it is stored"
    assert not journal.is_unstored(request) and journal.unstored(model) == journal.unstored_models() == []
    assert replayed(scene, model) == [1, 3]
    assert journal.snapshot_taken(taken(model, 3))
    other = published(scene, session, model, 4)
    assert journal.is_unstored(other)
    scene.journal.sessions.finish(session, scene.owner, None)
    assert not journal.is_unstored(other) and journal.unstored(model) == [], "nobody samples it any more"
    assert journal.snapshot_taken(taken(model, 4))


def test_forgotten_snapshot_is_ignored(scene):
    model, journal = scene.model(), scene.journal.recovery
    executed(scene, model, 1, 2, 3)
    journal.snapshot_taken(taken(model, 1))
    journal.snapshot_taken(taken(model, 2))
    journal.forget_snapshot(taken(model, 2).path)
    journal.snapshot_taken(taken(model, 3))
    assert replayed(scene, model) == [2, 3]
    assert journal.superfluous() == []


def test_payloads_are_kept_while_a_replay_needs_them(scene, clock):
    model, journal = scene.model(), scene.journal
    executed(scene, model, 1, 2)
    answered_at = clock.now()
    clock.advance(200)
    assert journal.results.expire(100) == 3
    kept = journal.recovery.executed(model, 0, 10)
    assert [one.request.payload for one in kept] == [b"payload 1", b"payload 2"]
    assert [one.succeeded for one in kept] == [None, None]
    assert [one.answered_at for one in kept] == [answered_at] * 2
    assert journal.recovery.snapshot_taken(taken(model, 1))
    assert journal.recovery.snapshot_taken(taken(model, 2))
    with journal._database.read() as connection:
        payloads = dict(connection.exec_driver_sql("SELECT seq_id, payload FROM request WHERE seq_id > 0").all())
    assert {seq: bytes(payload) for seq, payload in payloads.items()} == {1: b"", 2: b"payload 2"}


def test_request_cancelled_before_its_answer_is_replayed(scene):
    model = scene.model()
    pending = scene.taken(model, 1)
    scene.journal.results.finish([pending.failed("cancelled", "user")])
    assert replayed(scene, model) == []
    assert scene.journal.results.finish([replace(pending.done(b"late", "json"), replays=True)]) == []
    assert replayed(scene, model) == [1]


def test_ended_model_needs_no_payloads(scene):
    model = scene.model()
    executed(scene, model, 1, 2)
    scene.journal.recovery.snapshot_taken(taken(model, 1))
    unload = scene.journal.models.request_unload(model, "over")
    (pending,) = scene.journal.requests.ready(model)
    assert pending.id == unload
    scene.journal.results.finish([pending.done(b"", "json", ModelEnded(model, ModelState.UNLOADED, "over"))])
    assert replayed(scene, model) == []
    assert scene.journal.recovery.superfluous() == [taken(model, 1).path]
    scene.journal.recovery.forget_snapshot(taken(model, 1).path)
    assert scene.journal.recovery.superfluous() == []


def test_last_two_snapshots_and_used_ones_are_kept(scene):
    session = scene.session()
    model, journal = scene.model(session), scene.journal.recovery
    executed(scene, model, 1, 2, 3)
    scene.sampler(session, 1, snapshot_id="used")
    for seq in (1, 2, 3):
        journal.snapshot_taken(taken(model, seq))
    journal.snapshot_taken(taken(model, 2, snapshot_id="used"))
    journal.snapshot_taken(taken(model, 2, snapshot_id="unused"))
    assert sorted(journal.superfluous()) == [taken(model, 1).path, taken(model, 2, snapshot_id="unused").path]
    found = journal.sampler_snapshot("used")
    assert found is not None and found.model_id == model
    assert journal.sampler_snapshot("other") is None


def test_later_publication_of_a_shared_snapshot_replaces_the_earlier_one(scene):
    session = scene.session()
    model, journal = scene.model(session), scene.journal.recovery
    scene.sampler(session, 1, snapshot_id="shared")
    first, second = taken(model, 1, snapshot_id="shared"), taken(model, 2, snapshot_id="shared")
    assert journal.snapshot_taken(first) and journal.sampler_snapshot("shared").path == first.path
    assert journal.superfluous() == []
    assert journal.snapshot_taken(second) and journal.sampler_snapshot("shared").path == second.path
    assert journal.superfluous() == [first.path]


def test_a_snapshot_whose_first_record_was_not_acknowledged_stays_in_use(scene):
    """The engine records a snapshot again after a commit whose answer it did not get, and deletes refused ones."""
    session = scene.session()
    model, journal = scene.model(session), scene.journal.recovery
    executed(scene, model, 1)
    request = published(scene, session, model, 2)
    for made in (taken(model, 1), taken(model, 2, snapshot_id=request)):
        assert journal.snapshot_taken(made) and journal.snapshot_taken(made)
    assert journal.sampler_snapshot(request).path == taken(model, 2, snapshot_id=request).path
    assert [view.seq_id for view in journal.snapshots(model)] == [1] and journal.superfluous() == []


def test_stray_snapshots_have_no_row_and_no_live_model(scene):
    live, ended, journal = scene.model(n=0), scene.model(n=1), scene.journal.recovery
    for model in (live, ended):
        journal.snapshot_taken(taken(model, 0))
        journal.snapshot_taken(taken(model, 0, snapshot_id=f"of {model}"))
    scene.journal.models.end(ended, ModelState.FAILED, "over")
    rows = {
        taken(model, 0, **more).path: model for model in (live, ended) for more in ({}, {"snapshot_id": f"of {model}"})
    }
    journal.note_store("file:///store", "a mark")
    assert journal.strays(rows, "a mark") == {}
    found = {f"tinker://{model}/recovery/seq-9": model for model in (live, ended, "never")}
    of_ended = {f"tinker://{ended}/recovery/seq-9": f"model {ended}, which is failed"}
    of_unknown = {"tinker://never/recovery/seq-9": "unknown model never"}
    assert journal.strays(rows | found, "a mark") == of_ended | of_unknown
    for other in ("mark of another store", None):
        assert journal.strays(rows | found, other) == of_ended


def test_waiting_clients_get_the_reason_of_the_wait(scene):
    scene.journal.base_models.register([("tiny", "{}")])
    session = scene.session()
    model = scene.model(session)
    request = scene.submit(model, 1)
    sampler = scene.sampler(session, 1)
    content = NewRequest(Kind.SAMPLE, "local", b"{}", "s", sampler_id=sampler, seq_id=0)
    sample, journal = scene.journal.requests.submit(content), scene.journal
    assert journal.queue.waits_for(request) is None
    journal.base_models.note_progress("tiny", "the worker group is starting")
    assert journal.queue.waits_for(request) == journal.queue.waits_for(sample) == "the worker group is starting"
    journal.models.note_progress(model, "restoring")
    assert journal.queue.waits_for(request) == "restoring"


def test_mark_of_a_store_is_known_while_rows_name_its_states(scene, save):
    journal, url = scene.journal.recovery, "file:///store"
    journal.note_store(url, "store-a")
    assert journal.store_mark(url) is None, "nothing in the store is needed"
    model = scene.model()
    path = save(model, "kept")
    assert (journal.store_mark(url), journal.store_mark("file:///other")) == ("store-a", None)
    journal.note_store(url, "store-b")
    assert journal.store_mark(url) == "store-b"
    scene.journal.checkpoints.delete(path, "local")
    assert journal.store_mark(url) is None
    executed(scene, model, 2)
    assert journal.snapshot_taken(taken(model, 2))
    assert journal.store_mark(url) == "store-b"


def test_suspect_requests_are_counted(scene):
    request, journal = scene.submit(scene.model(), 1), scene.journal.recovery
    assert journal.suspects([request]) == {request: (0, 0)}
    for counts in ((1, 0), (2, 1), (2, 1)):
        journal.suspect({request: counts})
        assert journal.suspects([request]) == {request: counts}
