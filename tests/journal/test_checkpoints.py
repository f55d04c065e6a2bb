"""Checkpoints and training runs as their owners see them."""

from __future__ import annotations

import pytest

from tinkerflow.backend.errors import NotFoundError
from tinkerflow.backend.journal import CheckpointKind


def test_lists_are_newest_first_in_pages_and_per_run(scene, save):
    session = scene.session()
    one, two = scene.model(session, 0), scene.model(session, 1)
    paths = [save(one, "a"), save(two, "b"), save(one, "c", CheckpointKind.SAMPLER_WEIGHTS)]
    page = scene.journal.checkpoints.page("local")
    assert ([view.path for view in page.rows], page.total) == (paths[::-1], 3)
    assert [view.path for view in scene.journal.checkpoints.page("local", limit=1, offset=1).rows] == [paths[1]]
    of_run = scene.journal.checkpoints.page("local", run_id=one)
    assert ([view.path for view in of_run.rows], of_run.total) == ([paths[2], paths[0]], 2)
    assert scene.journal.checkpoints.page("stranger").rows == ()
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.page("stranger", run_id=one)


def test_deleting_is_soft_final_and_for_owners(scene, save):
    path = save(scene.model(), "a")
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.delete(path, "stranger")
    assert scene.journal.checkpoints.delete(path, "local").path == path
    for again in (scene.journal.checkpoints.delete, scene.journal.checkpoints.get):
        with pytest.raises(NotFoundError, match="does not exist"):
            again(path, "local")
    assert scene.journal.checkpoints.page("local").total == 0


def test_a_run_knows_its_newest_checkpoint_of_each_kind(scene, save):
    session = scene.session()
    model, bare = scene.model(session, 0), scene.model(session, 1)
    save(model, "a")
    newest = save(model, "b")
    sampler = save(model, "c", CheckpointKind.SAMPLER_WEIGHTS)
    run = scene.journal.models.run(model, "local")
    assert (run.model.id, run.last_checkpoint.path, run.last_sampler_checkpoint.path) == (model, newest, sampler)
    scene.journal.checkpoints.delete(newest, "local")
    assert scene.journal.models.run(model, "local").last_checkpoint.name == "a"
    runs = scene.journal.models.runs("local", limit=20, offset=0)
    assert {run.model.id: run.last_checkpoint and run.last_checkpoint.name for run in runs.rows} == {
        model: "a",
        bare: None,
    }
    assert runs.total == 2
    assert scene.journal.models.runs("stranger", limit=20, offset=0).rows == ()
    with pytest.raises(NotFoundError):
        scene.journal.models.run(model, "stranger")


def test_pages_of_runs_made_at_once_join_without_gap_or_repetition(scene, as_owner):
    session, apart = scene.session(), scene.session()
    made = {scene.model(session, n) for n in range(4)} | {scene.model(apart)}
    foreign = as_owner("stranger").model()
    whole = scene.journal.models.runs("local", limit=20, offset=0)
    listed = [run.model.id for run in whole.rows]
    assert (set(listed), whole.total) == (made, 5)
    pages = [scene.journal.models.runs("local", limit=2, offset=offset) for offset in (0, 2, 4, 6)]
    assert [run.model.id for page in pages for run in page.rows] == listed
    assert [(len(page.rows), page.total) for page in pages] == [(2, 5), (2, 5), (1, 5), (0, 5)]
    scene.journal.sessions.assign_project(apart, "local", "lab")
    in_lab = scene.journal.models.runs("local", limit=20, offset=0, project_id="lab")
    assert ([run.model.session_id for run in in_lab.rows], in_lab.total) == ([apart], 1)
    everybodys = scene.journal.models.runs(None, limit=20, offset=0)
    assert {run.model.id for run in everybodys.rows} == made | {foreign}


def test_lists_take_few_statements(scene, save, statements):
    session = scene.session()
    for n in range(5):
        save(scene.model(session, n), "a")
    with statements() as made:
        assert len(scene.journal.models.runs("local", limit=20, offset=0).rows) == 5
        assert len(scene.journal.checkpoints.page("local").rows) == 5
    assert len(made) == 3 + 2
