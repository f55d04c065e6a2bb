"""Uploads of adapters: started, recorded file by file, finished once, and due for removal an hour after they expire."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from datetime import timedelta
from threading import Barrier

import pytest
from tests.journal.conftest import checkpoint

from tinkerflow.backend.core.errors import ConflictError, NotFoundError, UserError
from tinkerflow.backend.journal import Limits, NewUpload
from tinkerflow.backend.journal.quotas import NO_LIMITS
from tinkerflow.backend.journal.uploads import MOST_OPEN


def begun(journal, clock, upload_id="upload-1", owner="team", max_bytes=100):
    spec = {"rank": 4, "train_attn": True, "train_mlp": False, "train_unembed": True}
    expires_at = clock.now() + timedelta(hours=1)
    new = NewUpload(
        id=upload_id, owner=owner, key_id="k", project_id="label", base_model="tiny", max_bytes=max_bytes,
        expires_at=expires_at, **spec,
    )  # fmt: skip
    journal.uploads.start(new, NO_LIMITS)
    return new


def saved(upload, attempt="attempt-1"):
    changes = {"owner": upload.owner, "rank": 4, "train_mlp": False, "step": 0, "size_bytes": 10, "attempt": attempt}
    return checkpoint(f"tinker://{upload.id}:train:0/weights/imported", **changes)


def test_upload_is_visible_to_its_owner_only(journal, clock):
    new = begun(journal, clock)
    found = journal.uploads.get(new.id, "team")
    assert asdict(new).items() <= asdict(found).items() and (found.files, found.path) == ({}, None)
    with pytest.raises(NotFoundError):
        journal.uploads.get(new.id, "other")


def test_files_of_an_upload_may_begin_at_the_same_time(journal, clock):
    new = begun(journal, clock)
    together = Barrier(2, timeout=60)

    def begin(file):
        for n in range(20):
            together.wait()
            journal.uploads.begin_file(new.id, file, f"{file}@{n}")

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(begin, "ab"))
    assert journal.uploads.get(new.id, None).files == {"a": ["a@19", 0], "b": ["b@19", 0]}


def test_only_the_newest_pieces_of_an_uploaded_file_count(journal, clock):
    new = begun(journal, clock)
    assert journal.uploads.begin_file(new.id, "f", "f@1") == ""
    journal.uploads.arrived(new.id, "f", "f@1", 3)
    assert journal.uploads.begin_file(new.id, "f", "f@2") == "f@1"
    with pytest.raises(ConflictError, match="only the newest one counts"):
        journal.uploads.arrived(new.id, "f", "f@1", 3)
    journal.uploads.arrived(new.id, "f", "f@2", 1)
    assert [tuple(each) for each in journal.uploads.get(new.id, None).files.values()] == [("f@2", 1)]


def test_finished_upload_is_a_checkpoint_of_a_finished_session(journal, clock):
    new = begun(journal, clock)
    upload = journal.uploads.get(new.id, "team")
    other = replace(saved(upload), path=f"tinker://{upload.id}:train:0/weights/imported-2", name="imported-2")
    for each in (saved(upload), saved(upload), other):
        assert journal.uploads.finish(upload, each) == saved(upload).path
    assert journal.uploads.get(new.id, "team").path == saved(upload).path
    assert journal.checkpoints.get(saved(upload).path, "team").rank == 4
    assert journal.sessions.get(new.id, "team").project_id == "label"
    assert [entry.event for entry in journal.audit.entries("team")] == ["checkpoint_imported"]


def test_removed_upload_creates_no_checkpoint(journal, clock):
    upload = journal.uploads.get(begun(journal, clock).id, None)
    journal.uploads.forget(upload.id)
    with pytest.raises(ConflictError, match="was removed during its completion"):
        journal.uploads.finish(upload, saved(upload))
    with pytest.raises(NotFoundError):
        journal.checkpoints.get(saved(upload).path, "team")


def test_open_uploads_are_limited_and_count_as_stored(journal, clock):
    for number in range(MOST_OPEN):
        begun(journal, clock, f"upload-{number}")
    begun(journal, clock, "others", owner="other")
    with pytest.raises(UserError, match=f"must be fewer than {MOST_OPEN}"):
        begun(journal, clock, "one-more")
    clock.advance(3601)
    assert journal.uploads.over() == []
    late = NewUpload(**{**asdict(begun(journal, clock, "late")), "id": "next"})
    with pytest.raises(UserError, match=r"the upload has up to 100 bytes, .* its other uploads up to 100: .* 199"):
        journal.uploads.start(late, Limits(stored_bytes=199))
    journal.uploads.start(late, Limits(stored_bytes=200))
    clock.advance(3600)
    assert len(journal.uploads.over()) == MOST_OPEN + 1
