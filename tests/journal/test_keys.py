"""API keys: created, used and revoked, with secrets that are never stored."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.journal.conftest import checkpoint

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.core.ids import LOCAL_OWNER
from tinkerflow.backend.journal import Limits, NewSession
from tinkerflow.backend.journal.quotas import KEPT

ONE_OF_ALL = Limits(**dict.fromkeys((*KEPT, "kept_bytes"), 1))


def test_a_key_opens_its_project(scene, clock):
    journal = scene.journal
    assert not journal.keys.has_any()
    key, secret = journal.keys.create("laptop", "research", admin=True)
    assert secret.startswith("tml-")
    assert len(secret) > 43  # 256 bits
    assert secret.startswith(key.prefix)
    found = journal.keys.verify(secret)
    assert (found.id, found.owner, found.admin, found.name) == (key.id, "research", True, "laptop")
    for wrong in ("", "tml-", secret[:-1], secret + "x", key.prefix):
        assert journal.keys.verify(wrong) is None
    assert journal.keys.all()[0].last_used_at == clock.now()


def test_first_key_takes_over_sessions_made_without_a_key(scene):
    journal = scene.journal
    local, other = (journal.sessions.create(NewSession(owner, "0")) for owner in (LOCAL_OWNER, "other"))
    journal.keys.create("laptop", "research")
    later = journal.sessions.create(NewSession(LOCAL_OWNER, "0"))
    journal.keys.create("second", "search")
    owners = {session: journal.sessions.get(session, None).owner for session in (local, other, later)}
    assert owners == {local: "research", other: "other", later: LOCAL_OWNER}


def test_first_key_takes_over_local_rows_of_a_project_that_has_restored_rows(scene):
    journal = scene.journal
    local = {"owner": LOCAL_OWNER, "sdk_version": "0", "display_name": "mine"}
    for owner in (LOCAL_OWNER, "research"):  # `tinkerflow checkpoint rebuild-index` restores rows of any project
        journal.sessions.create(NewSession(**local | {"owner": owner}))
    before = {use.setting: use.used for use in journal.project_limits.use("research", ONE_OF_ALL)}
    journal.keys.create("laptop", "research")
    after = {use.setting: use.used for use in journal.project_limits.use("research", ONE_OF_ALL)}
    assert after == {setting: 2 * used for setting, used in before.items()} and after["max_sessions"] == 2
    assert not any(use.used for use in journal.project_limits.use(LOCAL_OWNER, ONE_OF_ALL))


def test_first_key_takes_over_a_save_that_is_being_written(scene):
    """The engine took the save from the journal before the key was created."""
    pending = scene.taken(scene.model(), 1)
    path = f"tinker://{pending.model_id}/weights/kept"
    scene.journal.keys.create("laptop", "research")
    scene.journal.results.finish([pending.done(b"{}", "json", checkpoint(path, owner=LOCAL_OWNER))])
    assert scene.journal.checkpoints.get(path, "research").owner == "research"
    (saved,) = scene.journal.audit.entries("research", resource="checkpoint")
    assert saved.tinker_path == path


def test_revoked_key_is_refused(scene, clock):
    key, secret = scene.journal.keys.create(" a\n", "  p ")
    assert (key.name, key.project) == ("a", "p"), "stored without spaces around them"
    when = scene.journal.keys.revoke(key.id).revoked_at
    assert when == clock.now()
    clock.advance(5)
    assert scene.journal.keys.revoke(key.id).revoked_at == when
    assert scene.journal.keys.verify(secret) is None
    assert scene.journal.keys.has_any()
    with pytest.raises(NotFoundError, match="api_key 'key-none'"):
        scene.journal.keys.revoke("key-none")


def test_key_use_is_recorded_once_a_minute(scene, clock, statements):
    _, secret = scene.journal.keys.create("a", "p")
    scene.journal.keys.verify(secret)
    first = clock.now()
    clock.advance(59)
    with statements() as made:
        scene.journal.keys.verify(secret)
    assert len(made) == 1
    assert scene.journal.keys.all()[0].last_used_at == first
    clock.advance(1)
    scene.journal.keys.verify(secret)
    assert scene.journal.keys.all()[0].last_used_at == clock.now()


def test_no_secret_is_in_the_database_file(scene, url):
    _, secret = scene.journal.keys.create("a", "p")
    scene.journal.keys.verify(secret)
    if url.startswith("sqlite"):
        path = Path(url.removeprefix("sqlite:///"))
        for file in path.parent.glob(path.name + "*"):
            assert secret.encode() not in file.read_bytes()
    assert secret not in repr(scene.journal.keys.all())
