"""Checkpoints and training runs as their owners see them: listed, published, expired, deleted, and opened by tokens."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.journal import CheckpointKind, access_hash
from tinkerflow.backend.journal.checkpoints import BeforeSave


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


def test_deletion_is_soft_final_and_for_owners(scene, save):
    path = save(scene.model(), "a")
    with pytest.raises(NotFoundError):
        scene.journal.checkpoints.delete(path, "stranger")
    assert scene.journal.checkpoints.delete(path, "local").path == path
    for again in (scene.journal.checkpoints.delete, scene.journal.checkpoints.get):
        with pytest.raises(NotFoundError, match="does not exist"):
            again(path, "local")
    assert scene.journal.checkpoints.page("local").total == 0


def test_run_lists_its_newest_checkpoint_of_each_kind(scene, save):
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


def events(journal, owner="local"):
    return [entry.event for entry in journal.audit.entries(owner, resource="checkpoint")]


def test_expired_checkpoints_are_hidden_and_lose_their_row_first(scene, save, clock):
    model = scene.model()
    short, long = save(model, "short", ttl=10), save(model, "long", ttl=1000)
    assert scene.journal.checkpoints.get(short, "local").path == short
    clock.advance(10)
    for owner in ("local", None):
        with pytest.raises(NotFoundError):
            scene.journal.checkpoints.get(short, owner)
    assert [view.path for view in scene.journal.checkpoints.page("local").rows] == [long]
    assert scene.journal.checkpoints.before_save(short, model).is_gone
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
    assert not scene.journal.checkpoints.before_save(path, model).is_gone
    assert not scene.journal.checkpoints.before_save("tinker://m/weights/never", model).is_gone
    scene.journal.checkpoints.delete(path, "local")
    assert scene.journal.checkpoints.before_save(path, model).is_gone
    assert save(model, "a") == path
    assert scene.journal.checkpoints.get(path, "local").attempt == "a-2"
    assert scene.journal.upkeep.unpurged() == []
    scene.journal.upkeep.purged(path, "a-1")  # a slow sweep of the first checkpoint
    scene.journal.checkpoints.delete(path, "local")
    assert scene.journal.upkeep.unpurged() == [(path, "a-2")]


def test_publishing_is_for_owners_and_repeatable_until_deletion(scene, save):
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


@pytest.mark.parametrize("seconds", [1e13, 1e300, float("inf")])
def test_ttl_beyond_the_calendar_is_capped(scene, save, seconds):
    path, end = save(scene.model(), "a"), datetime.max.replace(tzinfo=UTC)
    assert scene.journal.checkpoints.set_ttl(path, "local", seconds).expires_at == end
    assert scene.journal.shares.create(path, None, seconds)[0].expires_at == end
    assert scene.journal.results.expire(seconds) == 0, "nothing is older than the calendar"


def test_ttl_is_set_and_cleared_by_owners(scene, save, clock):
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


def test_access_token_opens_one_unchanged_checkpoint_until_it_expires_or_is_revoked(scene, save, clock):
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


def test_save_gets_the_metadata_of_its_run(scene):
    run = scene.model(user_metadata={"team": "blue"})
    assert scene.journal.checkpoints.before_save("tinker://m/weights/new", run) == BeforeSave({"team": "blue"}, False)
    with pytest.raises(NotFoundError, match="model 'nobody'"):
        scene.journal.checkpoints.before_save("tinker://m/weights/new", "nobody")
