"""What becomes of checkpoints: published, expired, deleted, copied, shared by token."""

from __future__ import annotations

import pytest

from tinkerflow.backend.errors import NotFoundError
from tinkerflow.backend.journal import CheckpointKind, CheckpointSaved, CopyMade, ModelState, SessionState, access_hash


def events(journal, owner="local"):
    return [entry.event for entry in journal.audit.entries(owner, resource="checkpoint")]


def test_expired_ones_are_invisible_at_once_and_deleted_row_first(scene, save, clock):
    model = scene.model()
    short, long = save(model, "short", ttl=10), save(model, "long", ttl=1000)
    assert scene.journal.checkpoints.get(short, "local").path == short
    clock.advance(10)
    for owner in ("local", None):
        with pytest.raises(NotFoundError):
            scene.journal.checkpoints.get(short, owner)
    assert [view.path for view in scene.journal.checkpoints.page("local").rows] == [long]
    assert scene.journal.checkpoints.is_gone(short)
    assert scene.journal.upkeep.unpurged() == []
    assert scene.journal.upkeep.delete_expired() == [short]
    assert scene.journal.upkeep.delete_expired() == []
    assert scene.journal.upkeep.unpurged() == [(short, "short-1")]
    scene.journal.upkeep.purged(short, "another attempt")
    assert scene.journal.upkeep.unpurged() == [(short, "short-1")]
    scene.journal.upkeep.purged(short, "short-1")
    assert scene.journal.upkeep.unpurged() == []
    assert events(scene.journal) == ["checkpoint_saved", "checkpoint_saved", "checkpoint_expired"]


def test_a_name_can_be_saved_again_while_the_files_of_its_deleted_checkpoint_wait(scene, save):
    model = scene.model()
    path = save(model, "a")
    assert not scene.journal.checkpoints.is_gone(path)
    assert not scene.journal.checkpoints.is_gone("tinker://m/weights/never")
    scene.journal.checkpoints.delete(path, "local")
    assert scene.journal.checkpoints.is_gone(path)
    assert save(model, "a") == path
    assert scene.journal.checkpoints.get(path, "local").attempt == "a-2"
    assert scene.journal.upkeep.unpurged() == []
    scene.journal.upkeep.purged(path, "a-1")  # a slow sweep of the first one
    scene.journal.checkpoints.delete(path, "local")
    assert scene.journal.upkeep.unpurged() == [(path, "a-2")]


def test_publishing_is_for_owners_repeatable_and_ends_with_the_bytes(scene, save):
    model = scene.model()
    path = save(model, "a")
    for public in (True, False):
        with pytest.raises(NotFoundError):
            scene.journal.checkpoints.publish(path, "stranger", public)
    for _ in range(2):
        assert scene.journal.checkpoints.publish(path, "local").public
    assert scene.journal.checkpoints.get(path, "stranger").path == path
    assert scene.journal.checkpoints.page("stranger").rows == ()
    for change in (scene.journal.checkpoints.delete, scene.journal.checkpoints.publish):
        with pytest.raises(NotFoundError):
            change(path, "stranger")
    assert not scene.journal.checkpoints.publish(path, "local", False).public
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.get(path, "stranger")
    scene.journal.checkpoints.publish(path, "local")
    assert save(model, "a") == path
    assert not scene.journal.checkpoints.get(path, "local").public
    assert events(scene.journal).count("checkpoint_published") == 3


def test_a_ttl_is_set_cleared_and_for_owners(scene, save, clock):
    path = save(scene.model(), "a", ttl=3600)
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.set_ttl(path, "stranger", None)
    assert scene.journal.checkpoints.set_ttl(path, "local", None).expires_at is None
    clock.advance(7200)
    assert scene.journal.checkpoints.get(path, "local").expires_at is None
    scene.journal.checkpoints.set_ttl(path, "local", 100)
    clock.advance(100)
    assert scene.journal.upkeep.delete_expired() == [path]
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.set_ttl(path, "local", None)


def test_a_token_opens_one_checkpoint_until_it_expires_is_revoked_or_the_bytes_change(scene, save, clock):
    model = scene.model()
    path, other = save(model, "a"), save(model, "b")
    share, token = scene.journal.shares.create(path, "local", 100)
    assert token.startswith("tfw-") and share.path == path
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.get(path, "stranger", access=access_hash(token + "x"))
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.get(other, "stranger", access=access_hash(token))
    assert scene.journal.checkpoints.get(path, "stranger", access=access_hash(token)).path == path
    clock.advance(100)
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.get(path, "stranger", access=access_hash(token))

    second, token = scene.journal.shares.create(path, None)
    assert scene.journal.checkpoints.get(path, "stranger", access=access_hash(token)).path == path
    assert [row.id for row in scene.journal.shares.all(path)] == [share.id, second.id]
    revoked = scene.journal.shares.revoke(second.id)
    clock.advance(1)
    assert scene.journal.shares.revoke(second.id).revoked_at == revoked.revoked_at
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.get(path, "stranger", access=access_hash(token))

    _, token = scene.journal.shares.create(path, "local")
    save(model, "a")
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.get(path, "stranger", access=access_hash(token))
    for nothing in (
        lambda: scene.journal.shares.revoke("share-x"),
        lambda: scene.journal.shares.create(path, "stranger"),
    ):
        with pytest.raises(NotFoundError):
            nothing()
    assert events(scene.journal).count("checkpoint_shared") == 3
    assert events(scene.journal).count("checkpoint_unshared") == 1


def test_a_copy_has_a_run_of_its_own_that_takes_no_work(scene, save, as_owner):
    source = save(scene.model(), "a")
    run = "copy-1:train:0"
    path = f"tinker://{run}/weights/a"
    saved = CheckpointSaved(
        path, run, CheckpointKind.WEIGHTS, "a", "team", "tiny", 8, True, False, True, 3, 10, {"k": "v"}, attempt="t"
    )
    for _ in range(2):
        assert scene.journal.imports.record_copy(CopyMade("copy-1", saved, source)) == path
    found = scene.journal.checkpoints.get(path, "team")
    assert (found.step, found.user_metadata, found.attempt, found.public) == (3, {"k": "v"}, "t", False)
    assert [row.path for row in scene.journal.checkpoints.page("team", run_id=run).rows] == [path]
    assert scene.journal.models.get(run, "team").state == ModelState.UNLOADED
    assert scene.journal.sessions.get("copy-1", "team").state == SessionState.FINISHED
    assert events(scene.journal, "team") == ["checkpoint_copied"]
    request = as_owner("team").submit(run, 1)
    assert "holds a copy" in scene.journal.requests.result(request, "team").error
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.get(path, "local")
