"""The lists for the sweep of the store: deleted checkpoints, and changes for their commits."""

from __future__ import annotations

from datetime import timedelta

import pytest

from tinkerflow.backend.journal import (
    CheckpointKind,
    Retention,
    SamplerState,
)


# ------------------------------------------------------------------ retention
@pytest.fixture
def steps(scene, save, clock):
    """The paths, by kind and step, of a model's checkpoints of both kinds at steps 1 to 6."""
    model, found = scene.model(), {}
    for step in range(1, 7):
        for kind in (CheckpointKind.WEIGHTS, CheckpointKind.SAMPLER_WEIGHTS):
            found[kind, step] = save(model, f"s{step}", kind, step=step)
        clock.advance(1)
    return found


def left(scene):
    return [view.path for view in scene.journal.checkpoints.page("local").rows]


@pytest.mark.parametrize(
    ("rule", "kept"),
    [
        (Retention(), {1, 2, 3, 4, 5, 6}),
        (Retention(0, 2), {1, 2, 3, 4, 5, 6}),
        (Retention(1), {6}),
        (Retention(2), {5, 6}),
        (Retention(2, 3), {3, 5, 6}),
        (Retention(1, 2), {2, 4, 6}),
        (Retention(9), {1, 2, 3, 4, 5, 6}),
    ],
)
def test_retention_keeps_the_last_and_every_nth_of_each_kind(scene, steps, rule, kept):
    gone = scene.journal.upkeep.delete_retired(rule)
    assert set(gone) == {path for (_, step), path in steps.items() if step not in kept}
    assert set(left(scene)) == {path for (_, step), path in steps.items() if step in kept}
    assert {path for path, _ in scene.journal.upkeep.unpurged()} == set(gone)
    assert scene.journal.upkeep.delete_retired(rule) == []


def test_a_sweep_with_nothing_to_delete_does_not_write(scene, steps, statements):
    with statements() as made:
        assert scene.journal.upkeep.delete_retired(Retention(9)) == scene.journal.upkeep.delete_expired() == []
    assert len(made) == 2 and not any("UPDATE" in one for one in made)


def test_files_that_cannot_be_removed_do_not_delay_later_ones(scene, save, clock):
    model = scene.model()
    paths = [save(model, name) for name in ("stuck", "later")]
    for path in paths:
        scene.journal.checkpoints.delete(path, "local")
        clock.advance(1)
    assert scene.journal.upkeep.unpurged(limit=1) == [(paths[1], "later-2")]
    scene.journal.upkeep.purged(paths[1], "later-2")
    assert scene.journal.upkeep.unpurged(limit=1) == [(paths[0], "stuck-1")]


def test_retention_is_bounded_and_takes_the_oldest_first(scene, steps):
    assert {path[-2:] for path in scene.journal.upkeep.delete_retired(Retention(1), limit=4)} == {"s1", "s2"}
    assert {path[-2:] for path in scene.journal.upkeep.delete_retired(Retention(1), limit=4)} == {"s3", "s4"}


def test_retention_keeps_the_last_saves_after_the_clock_was_set_back(scene, save, clock):
    model = scene.model()
    before = [save(model, name) for name in ("a", "b")]
    clock.advance(-3600)
    after = [save(model, name) for name in ("c", "d")]
    assert left(scene) == [*reversed(after), *reversed(before)]
    assert set(scene.journal.upkeep.delete_retired(Retention(2))) == set(before)


def test_retention_keeps_checkpoints_that_are_in_use(scene, save, clock):
    """Published, shared, sampled, expiring and exported checkpoints are kept, and no others."""
    model = scene.model()
    names = ("public", "shared", "revoked", "over", "sampled", "unsampled", "ttl", "plain", "newest")
    path = {name: save(model, name, ttl=3600 if name == "ttl" else None) for name in names}
    export = save(model, "export", CheckpointKind.EXTERNAL_WEIGHTS)
    scene.journal.checkpoints.publish(path["public"], "local")
    scene.journal.shares.create(path["shared"], "local")
    scene.journal.shares.revoke(scene.journal.shares.create(path["revoked"], "local")[0].id)
    scene.journal.shares.create(path["over"], "local", 10)
    session = scene.session()
    scene.sampler(session, model_path=path["sampled"])
    other = scene.session()
    ended = scene.sampler(other, model_path=path["unsampled"])
    scene.journal.sessions.finish(other, "local")
    assert scene.journal.samplers.get(ended, None).state != SamplerState.LIVE
    clock.advance(10)
    save(model, "last")
    kept = {path[name] for name in ("public", "shared", "sampled", "ttl")} | {export}
    scene.journal.upkeep.delete_retired(Retention(1))
    assert set(left(scene)) == kept | {f"tinker://{model}/weights/last"}
    assert scene.journal.audit.entries("local", resource="checkpoint")[-1].event == "checkpoint_expired"


def test_retention_counts_runs_separately(scene, save):
    models = [scene.model(), scene.model()]
    paths = [save(model, "a") for model in models]
    assert scene.journal.upkeep.delete_retired(Retention(1)) == []
    assert set(left(scene)) == set(paths)


# ------------------------------------------------------------------ changes for the commit
def test_checkpoint_changes_are_passed_to_the_store_once(scene, save, clock):
    model = scene.model()
    one, two = save(model, "a"), save(model, "b")
    assert scene.journal.upkeep.unnoted() == []
    scene.journal.checkpoints.publish(one, "local")
    scene.journal.checkpoints.set_ttl(two, "local", 100)
    seen = scene.journal.upkeep.unnoted()
    assert [(view.path, view.public, view.expires_at) for view in seen] == [
        (two, False, clock.now() + timedelta(seconds=100)),
        (one, True, None),
    ]
    assert [view.path for view in scene.journal.upkeep.unnoted(limit=1)] == [two], "the commit of a may be unwritable"
    scene.journal.checkpoints.publish(one, "local", False)  # a new change while the first change was being written
    for view in seen:
        scene.journal.upkeep.noted(view)
    assert [(view.path, view.public) for view in scene.journal.upkeep.unnoted()] == [(one, False)]
    scene.journal.checkpoints.delete(one, "local")
    assert scene.journal.upkeep.unnoted() == []
    assert save(model, "a") == one
    assert scene.journal.upkeep.unnoted() == []
