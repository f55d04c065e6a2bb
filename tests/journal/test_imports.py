"""Checkpoint rows that no save created: copies, and checkpoints found only in the store."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta

import pytest
from tests.journal.conftest import checkpoint

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal import (
    ModelState,
    SessionState,
)

PATH = "tinker://lost-1:train:0/weights/a"
SAVED = checkpoint(PATH, owner="team", train_mlp=False, step=3, size_bytes=10, user_metadata={"k": "v"}, attempt="t-1")


def test_copy_has_a_separate_run_without_work(scene, save, as_owner):
    source = save(scene.model(), "a")
    run = "copy-1:train:0"
    path = f"tinker://{run}/weights/a"
    saved = replace(SAVED, path=path, run_id=run, attempt="t")
    for _ in range(2):
        assert scene.journal.imports.record_copy("copy-1", saved, source) == path
    found = scene.journal.checkpoints.get(path, "team")
    assert (found.step, found.user_metadata, found.attempt, found.public) == (3, {"k": "v"}, "t", False)
    assert [row.path for row in scene.journal.checkpoints.page("team", run_id=run).rows] == [path]
    assert scene.journal.models.get(run, "team").state == ModelState.UNLOADED
    assert scene.journal.sessions.get("copy-1", "team").state == SessionState.FINISHED
    events = [entry.event for entry in scene.journal.audit.entries("team", resource="checkpoint")]
    assert events == ["checkpoint_copied"]
    request = as_owner("team").submit(run, 1)
    assert "is a copy of" in scene.journal.results.get(request, "team").error
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.get(path, "local")


def test_lost_row_is_restored_with_its_run(scene, clock):
    saved_at = clock.now() - timedelta(days=3)
    found = (replace(SAVED, created_at=saved_at), True, {"renderer": "qwen3"})
    assert scene.journal.imports.restore(*found, before=None)
    assert not scene.journal.imports.restore(*found, before="t-1")
    row = scene.journal.checkpoints.get(PATH, "team")
    assert (row.step, row.user_metadata, row.attempt, row.public) == (3, {"k": "v"}, "t-1", True)
    assert row.created_at == saved_at
    assert scene.journal.checkpoints.get(PATH, "stranger").path == PATH
    run = scene.journal.models.run(SAVED.run_id, "team")
    assert run.model.user_metadata == {"renderer": "qwen3"} and run.model.state == ModelState.UNLOADED
    assert [view.path for view in scene.journal.checkpoints.page("team", run_id=SAVED.run_id).rows] == [PATH]
    assert scene.journal.sessions.get("lost-1", "team").state == SessionState.FINISHED
    assert scene.journal.upkeep.unnoted() == []


def test_restoring_an_existing_checkpoint_changes_nothing(scene, save, clock):
    model = scene.model()
    path = save(model, "a")
    scene.journal.checkpoints.set_ttl(path, "local", 100)
    known = replace(SAVED, path=path, run_id=model, owner="local", attempt="a-1")
    assert not scene.journal.imports.restore(known, True, {}, "a-1")
    assert scene.journal.checkpoints.get(path, "local").expires_at is not None
    scene.journal.checkpoints.delete(path, "local")
    assert not scene.journal.imports.restore(known, False, {}, "a-1")
    assert scene.journal.checkpoints.page("local").rows == ()


def test_commit_overrides_the_row_of_an_earlier_save(scene, save, clock):
    model = scene.model()
    path = save(model, "a")
    newer = replace(SAVED, path=path, run_id=model, owner="local", attempt="a-9")
    before = scene.journal.imports.attempt_of(path)
    assert scene.journal.imports.restore(newer, False, {"lost": "run"}, before)
    assert scene.journal.checkpoints.get(path, "local").attempt == "a-9"
    assert scene.journal.models.get(model, "local").state == ModelState.LIVE
    assert scene.journal.models.get(model, "local").user_metadata == {}


def test_restoring_keeps_the_row_of_a_save_since_the_commit_was_read(scene, save):
    model = scene.model()
    path = f"tinker://{model}/weights/a"
    read = replace(SAVED, path=path, run_id=model, owner="local", attempt="a-0")
    assert scene.journal.imports.attempt_of(path) is None
    assert save(model, "a") == path
    assert not scene.journal.imports.restore(read, False, {}, None)
    assert scene.journal.checkpoints.get(path, "local").attempt == "a-1"
