"""Folders are created durably, and stored files are private under any umask."""

from __future__ import annotations

import hashlib
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tinkerflow.backend.catalog import model_source
from tinkerflow.backend.core import disk
from tinkerflow.backend.core.joining import make_secret
from tinkerflow.backend.journal import Journal, NewSession, migrate
from tinkerflow.backend.settings import Settings
from tinkerflow.backend.store.blobs import open_blobs
from tinkerflow.backend.store.gcs import Stamp
from tinkerflow.backend.store.local import LocalBlobs


def test_a_folder_is_made_with_its_parents_and_each_new_entry_is_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[Path] = []
    monkeypatch.setattr(disk, "flush", flushed.append)
    disk.make_folder(tmp_path / "a" / "b")
    assert (tmp_path / "a" / "b").is_dir()
    assert flushed == [tmp_path, tmp_path / "a"]
    disk.make_folder(tmp_path / "a" / "b")
    assert len(flushed) == 2


@pytest.fixture(params=[0o000, 0o022, 0o077])
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    before = os.umask(request.param)
    yield request.param
    os.umask(before)


def make_everything(data: Path) -> None:
    """Create one of each kind of file that the journal, the store, the catalog and a worker group store."""
    url = f"sqlite:///{data}/journal.db"
    migrate(url)
    journal = Journal.open(url)
    journal.sessions.create(NewSession("local", "0"))
    blobs = LocalBlobs(data / "store")
    blobs.create("runs/a/weights/b/commit.json", b"old")
    assert blobs.replace("runs/a/weights/b/commit.json", b"old", b"new")
    blobs.create("runs/a/weights/b/attempt-1/model.safetensors", b"x")
    assert blobs.remove("runs/a/weights/b/attempt-1/model.safetensors")
    make_secret(data / "secrets" / "group.secret")
    stamp = Stamp(3, "1", hashlib.md5(b"abc", usedforsecurity=False).digest())
    with disk.locked(data / "lock"):
        model_source._copy("gs://b/m", lambda name, start, length: b"abc", {"config.json": stamp}, data / "models")
    assert {"journal.db", "journal.db-wal", "journal.db-shm"} <= {path.name for path in data.iterdir()}
    journal.close()


def readable_by_others(root: Path) -> list[str]:
    return [
        f"{path}: {stat.filemode(path.stat().st_mode)}"
        for path in (root, *root.rglob("*"))
        if path.stat().st_mode & 0o077
    ]


def test_every_file_is_private_from_its_creation(umask: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "chmod", lambda *_: pytest.fail("a mode was changed after the creation"))
    make_everything(tmp_path / "data")
    assert readable_by_others(tmp_path / "data") == []


def test_upgrade_repairs_file_modes_of_earlier_releases(umask: int, tmp_path: Path) -> None:
    data = tmp_path / "data"
    make_everything(data)
    for path in (data / "journal.db", data / "store", *(data / "store").rglob("*")):
        path.chmod(0o777 if path.is_dir() else 0o666)
    Journal.open(f"sqlite:///{data}/journal.db").close()
    LocalBlobs(data / "store")
    assert readable_by_others(data) == []


def test_file_mode_that_cannot_be_repaired_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("not yours")

    (tmp_path / "file").touch(0o644)
    monkeypatch.setattr(Path, "chmod", refuse)
    disk.make_private(tmp_path / "file", tmp_path / "missing")
    assert "file can be read by other users, and its mode cannot be changed: not yours" in caplog.text


def test_a_draft_belongs_to_one_call(tmp_path: Path) -> None:
    folder, left = tmp_path / "merged", tmp_path / ".merged.partial"
    (left / "half").mkdir(parents=True)
    with disk.draft_of(folder) as draft:
        assert list(draft.iterdir()) == [], "the draft of an interrupted call is replaced"
        (draft / "config.json").write_text("{}")
        with pytest.raises(FileExistsError, match="another command is writing it"), disk.draft_of(folder):
            pass
    assert [file.name for file in folder.iterdir()] == ["config.json"]
    with pytest.raises(ZeroDivisionError), disk.draft_of(tmp_path / "failed") as draft:
        (draft / "config.json").write_text(f"{1 / 0}")
    assert list(tmp_path.iterdir()) == [folder]


def test_a_file_url_is_decoded(tmp_path: Path) -> None:
    (tmp_path / "my models").mkdir()
    for url in ((tmp_path / "my models").as_uri(), f"file://{tmp_path}/my models"):
        assert disk.folder_of_url(url) == tmp_path / "my models"
        assert model_source.find_model(url) == tmp_path / "my models"
        open_blobs(url).create("key", url.encode())
        (tmp_path / "my models" / "key").unlink()
    (tmp_path / "a%20b").mkdir()  # from an earlier release, which did not decode URLs
    assert disk.folder_of_url(f"file://{tmp_path}/a%20b") == tmp_path / "a%20b"


def test_a_data_dir_with_any_name_has_a_store(tmp_path: Path) -> None:
    settings = Settings(data_dir=tmp_path / "100%25 ü")
    for url, name in ((settings.store_url, "store"), (settings.pipelines_url, "pipelines")):
        assert disk.folder_of_url(url) == tmp_path / "100%25 ü" / name


def test_base_model_names_lose_trailing_slashes() -> None:
    given = ("models/tiny/", "org/model", "gs://bucket/a//", "/")
    assert Settings(base_models=given).base_models == ("models/tiny", "org/model", "gs://bucket/a", "/")
