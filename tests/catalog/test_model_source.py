"""Base models from a fake bucket are copied to the host once, completely and verified."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save
from tests.catalog.test_model_card import CONFIG
from tests.store.fake_gcs import FakeGcs, Fault

from tinkerflow.backend.catalog.model_source import TEXT_FILES, find_model
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.core.ids import hub_name

URL = "gs://bucket/models/tiny"
WEIGHTS = save({"a": np.arange(5_000_000, dtype=np.float32)})  # read in two parts


@pytest.fixture
def gcs(tmp_path: Path) -> Iterator[FakeGcs]:
    """A bucket that contains a model, and a folder for the copies."""
    with FakeGcs() as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        patch.setattr("huggingface_hub.constants.HF_HOME", str(tmp_path))
        files = {"config.json": json.dumps(CONFIG).encode(), "tokenizer.json": b"{}", "model.safetensors": WEIGHTS}
        for name, data in {**files, "README.md": b"#", "original/weights.pth": b"?"}.items():
            fake.write(f"models/tiny/{name}", data, None)
        yield fake


def reads(gcs: FakeGcs) -> list[str]:
    return [request for request in gcs.requests if "alt=media" in request]


def test_the_files_of_a_model_are_copied_once(gcs: FakeGcs) -> None:
    folder = find_model(URL)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS
    assert len(reads(gcs)) == 4
    assert find_model(URL + "/") == folder
    assert len(reads(gcs)) == 4


def test_copied_file_is_flushed_before_it_is_renamed(gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    happened: list[tuple[str, str]] = []
    sync, replace = os.fsync, os.replace

    def synced(descriptor: int) -> None:
        happened.append(("synced", Path(f"/proc/self/fd/{descriptor}").readlink().name))
        sync(descriptor)

    def replaced(self: Path, target: Path) -> None:
        happened.append(("named", target.name))
        replace(self, target)

    monkeypatch.setattr("os.fsync", synced)
    monkeypatch.setattr(Path, "replace", replaced)
    folder = find_model(URL)
    assert ("synced", folder.parent.name) in happened[: happened.index(("synced", "config.json.part"))]
    for name in ("config.json", "model.safetensors", "tokenizer.json"):
        named = happened.index(("named", name))
        assert happened[named - 1 : named + 2] == [("synced", f"{name}.part"), ("named", name), ("synced", folder.name)]


def test_tokenizer_files_are_copied_without_the_weights(gcs: FakeGcs) -> None:
    folder = find_model(URL, TEXT_FILES)
    assert sorted(path.name for path in folder.iterdir()) == ["config.json", "tokenizer.json"]
    assert find_model(URL) == folder
    assert (folder / "model.safetensors").read_bytes() == WEIGHTS


def test_replaced_model_gets_a_new_folder(gcs: FakeGcs) -> None:
    before = find_model(URL)
    gcs.write("models/tiny/tokenizer.json", b"[]", None)
    after = find_model(URL)
    assert before != after
    assert [(folder / "tokenizer.json").read_bytes() for folder in (before, after)] == [b"{}", b"[]"]


def test_damaged_copy_is_named_and_the_next_start_continues(gcs: FakeGcs) -> None:
    whole = gcs.objects["models/tiny/model.safetensors"]
    about = gcs.about

    def lies(name: str) -> dict[str, object]:
        return {**about(name), **({"md5Hash": "AAAA"} if name.endswith(".safetensors") else {})}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gcs, "about", lies)
        with pytest.raises(UserError, match=r"base model 'gs://.*model\.safetensors has .* MD5 .*; the bucket lists"):
            find_model(URL)
    begun = len(reads(gcs))
    folder = find_model(URL)
    assert (folder / "model.safetensors").read_bytes() == whole.data
    assert len(reads(gcs)) - begun == 3  # config.json was complete


def test_one_of_several_processes_copies_the_model(gcs: FakeGcs) -> None:
    found: list[Path] = []
    threads = [threading.Thread(target=lambda: found.append(find_model(URL))) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 3 and len(set(found)) == 1
    assert len(reads(gcs)) == 4


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("gs://", "the bucket is missing, as in gs://bucket/models/name"),
        ("gs://bucket/models/other", "there is no gs://bucket/models/other/config.json"),
    ],
)
def test_missing_model_is_named(gcs: FakeGcs, url: str, message: str) -> None:
    with pytest.raises(UserError, match=f"base model {url!r}: {message}"):
        find_model(url)


def test_bucket_that_refuses_access_is_named(gcs: FakeGcs) -> None:
    gcs.faults.append(Fault("GET", "tokenizer.json", status=403, times=100))
    with pytest.raises(UserError, match="base model 'gs://bucket/models/tiny': cannot be copied to"):
        find_model(URL)


def test_full_disk_is_named(gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shutil.disk_usage", lambda _: _Usage)
    with pytest.raises(UserError, match=r"copying needs 0\.0 GiB in .*, which has 0\.0 GiB free; set HF_HOME"):
        find_model(URL)


class _Usage:
    free = 1000


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("org/model", ("org/model", "")),
        ("org/model@v1.2", ("org/model", "v1.2")),
        ("org/model@refs/pr/1", ("org/model", "refs/pr/1")),
        ("gs://bucket/org@1/model", None),
        ("models/org/model", None),
        ("./model@v1", None),
    ],
)
def test_a_hub_id_may_have_a_revision(name: str, meant: tuple[str, str] | None) -> None:
    assert hub_name(name) == meant


def test_revision_with_slashes_is_passed_to_the_hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[tuple[str, str | None]] = []

    def download(repository: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((repository, revision))
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find_model("org/model@refs/pr/1") == tmp_path
    assert asked == [("org/model", "refs/pr/1")]
