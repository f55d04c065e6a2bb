"""The metrics of the whole service: usage, live models, unsaved changes, waiting requests, and drift."""

from __future__ import annotations

from dataclasses import replace

from tinkerflow.backend.journal import LossMeasured, SnapshotTaken, StepMeasured, UsageKind, Used


def test_model_is_unsaved_from_its_first_change_until_its_snapshot(scene, clock):
    model = scene.model()
    scene.model()  # never changed
    assert scene.journal.metrics.now().unsaved_since == {}
    made = clock.now()
    clock.advance(60)
    for seq in (1, 2):
        pending = scene.taken(model, seq)
        used = Used(pending.session_id, "tiny", UsageKind.TRAINING, 100)
        scene.journal.results.finish([replace(pending.done(b"r", "proto", used), replays=True)])
    found = scene.journal.metrics.now()
    assert found.unsaved_since == {"tiny": made}
    assert found.live == {"tiny": 2}
    assert found.used == {("tiny", "training"): 200}
    taken = clock.now()
    scene.journal.recovery.snapshot_taken(SnapshotTaken("snap-1", model, 1, 0, 10))
    assert scene.journal.metrics.now().unsaved_since == {"tiny": taken}
    scene.journal.recovery.snapshot_taken(SnapshotTaken("snap-2", model, 2, 0, 10))
    assert scene.journal.metrics.now().unsaved_since == {}


def test_metrics_give_the_oldest_waiting_request_by_kind(scene, clock):
    assert scene.journal.metrics.now().waiting_since == {"samples": None, "training": None}
    model, sampler = scene.model(), scene.sampler(scene.session())
    first = clock.now()
    scene.submit(model, 1)
    clock.advance(30)
    scene.sample(sampler, 0)
    scene.submit(model, 2)
    found = scene.journal.metrics.now()
    assert found.waiting_since == {"samples": clock.now(), "training": first}
    (pending, *_) = scene.journal.requests.ready(model)
    scene.journal.results.finish([replace(pending.done(b"r", "proto"), replays=True)])
    assert scene.journal.metrics.now().waiting_since["training"] == clock.now()


def test_the_drift_is_the_worst_of_the_newest_steps(scene):
    def train(model, seq, kl, agreement=None, first=None, supported=None):
        pending = scene.taken(model, seq)
        effects = (
            LossMeasured(model, 4, 4.0, 1.0, kl, agreement, first, supported),
            StepMeasured(model, seq, seq, 1.0, 1e-4),
        )
        scene.journal.results.finish([replace(pending.done(b"r", "proto", *effects), replays=True)])

    one, other = scene.model(), scene.model()
    train(one, 1, None)
    names = ("kl_sample_train", "routing_agreement", "first_routing_agreement", "support_replay")
    assert scene.journal.metrics.now().drift == {name: {} for name in names}
    train(one, 2, 0.5)
    train(other, 1, 0.125, 0.75, 0.875, 0.25)
    worst = {name: {"tiny": value} for name, value in zip(names, (0.5, 0.75, 0.875, 0.25), strict=True)}
    assert scene.journal.metrics.now().drift == worst
    train(one, 3, 0.0625, 0.5, 0.75, 1.0)
    worst |= {"kl_sample_train": {"tiny": 0.125}, "routing_agreement": {"tiny": 0.5}, names[2]: {"tiny": 0.75}}
    assert scene.journal.metrics.now().drift == worst
