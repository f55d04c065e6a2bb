"""Weights for use elsewhere: plain and encrypted exports, copies, byte ranges, and late deletions."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

import numpy as np
import pyrage
import pytest
from safetensors.numpy import load as load_safetensors

from tinkerflow.backend.core.encryption import check_recipients
from tinkerflow.backend.core.errors import ConflictError, NotFoundError, StoreError, UserError
from tinkerflow.backend.spec.commands import AdapterState
from tinkerflow.backend.store import CheckpointMeta, Saved, Store

RUN, OTHER = "sess-1:train:0", "copy-1:train:0"
Make = Callable[..., AdapterState]
Same = Callable[[AdapterState, AdapterState], None]


def whole(store: Store, saved: Saved, file: str) -> bytes:
    return store.read_range(saved, file, 0, 10**9)


def test_an_export_is_a_peft_folder_without_moments(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.export(RUN, "x", make_state(2), meta)
    assert saved.path == f"tinker://{RUN}/external_weights/x"
    assert sorted(saved.files) == ["adapter_config.json", "adapter_model.safetensors"]
    config = json.loads(whole(store, saved, "adapter_config.json"))
    assert (config["base_model_name_or_path"], config["r"], config["peft_type"]) == ("tiny", 4, "LORA")
    tensors = load_safetensors(whole(store, saved, "adapter_model.safetensors"))
    for name, array in make_state(2).weights.items():
        np.testing.assert_array_equal(tensors[name], array)
    assert store.find(saved.path) == saved
    assert store.checkpoints() == [saved]
    with pytest.raises(ConflictError, match="exists already; choose another name, or delete it first"):
        store.export(RUN, "x", make_state(3), meta)
    with pytest.raises(UserError, match="external weights are for downloads"):
        store.load(saved.path)


def test_encrypted_export_opens_only_for_its_recipients(
    store: Store, meta: CheckpointMeta, make_state: Make, tmp_path: Path
) -> None:
    one, two, stranger = (pyrage.x25519.Identity.generate() for _ in range(3))
    recipients = [str(one.to_public()), str(two.to_public())]
    ssh = None
    if keygen := shutil.which("ssh-keygen"):
        subprocess.run([keygen, "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / "key")], check=True)
        recipients.append((tmp_path / "key.pub").read_text().strip())
        ssh = pyrage.ssh.Identity.from_buffer((tmp_path / "key").read_bytes())
    check_recipients(recipients, "age_encryption_recipients")
    plain = store.export(RUN, "plain", make_state(2), meta)
    saved = store.export(RUN, "secret", make_state(2), meta, recipients=recipients)
    assert sorted(saved.files) == ["adapter_config.json.age", "adapter_model.safetensors.age"]
    for file in plain.files:
        sealed = whole(store, saved, file + ".age")
        assert len(sealed) == saved.files[file + ".age"].size
        for identity in [one, two, *([ssh] if ssh else [])]:
            assert pyrage.decrypt(sealed, [identity]) == whole(store, plain, file)
        with pytest.raises(pyrage.DecryptError):
            pyrage.decrypt(sealed, [stranger])
    assert store.find(saved.path) == saved


@pytest.mark.parametrize(
    ("recipients", "said"),
    [
        (["age1nothing"], r"\[0\] is 'age1nothing': must be a native age recipient"),
        (["ssh-ed25519 AAAA"], r"\[0\] is 'ssh-ed25519 AAAA'"),
        ([""], r"\[0\] is ''"),
        ([str(pyrage.x25519.Identity.generate().to_public())] * 11, "has 11 entries: must be at most 10"),
    ],
)
def test_invalid_encryption_recipient_is_named(recipients: list[str], said: str) -> None:
    with pytest.raises(UserError, match="^age_encryption_recipients ?" + said):
        check_recipients(recipients, "age_encryption_recipients")


def test_copy_is_complete_independent_and_repeatable(
    store: Store, meta: CheckpointMeta, make_state: Make, same: Same
) -> None:
    source = store.save(RUN, "weights", "x", make_state(2), meta)
    due = datetime(2030, 1, 1, tzinfo=UTC)

    def copy() -> Saved:
        return store.copy(source.path, OTHER, owner="team", expires_at=due, request_id="req-1")

    saved = copy()
    assert saved.path == f"tinker://{OTHER}/weights/x"
    assert (saved.meta.owner, saved.meta.expires_at, saved.meta.user_metadata) == ("team", due, {"note": "first"})
    assert saved.files == source.files
    assert copy() == saved
    with pytest.raises(ConflictError):
        store.copy(source.path, OTHER, owner="team", expires_at=due, request_id="req-2")
    assert store.delete(source.path)
    state, _ = store.load(saved.path)
    same(state, make_state(2))
    with pytest.raises(NotFoundError):
        store.copy(source.path, "copy-2:train:0", owner="team", expires_at=None, request_id="req-3")


def test_a_copy_of_damaged_files_is_refused(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    source = store.save(RUN, "weights", "x", make_state(2), meta)
    key = f"runs/{RUN}/weights/x/{source.attempt}/adapter_model.safetensors"
    store.blobs.remove(key)
    store.blobs.create(key, b"?" * source.files["adapter_model.safetensors"].size)
    with pytest.raises(StoreError, match="does not have the SHA-256"):
        store.copy(source.path, OTHER, owner="team", expires_at=None, request_id="req-1")
    assert store.checkpoints(OTHER) == []


def test_byte_ranges_of_an_export_match_the_file(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.export(RUN, "x", make_state(2), meta)
    file = "adapter_model.safetensors"
    data = whole(store, saved, file)
    assert len(data) == saved.files[file].size
    for start, length in ((0, 10), (7, 100), (len(data) - 3, 3), (len(data) - 3, 100)):
        assert store.read_range(saved, file, start, length) == data[start : start + length]
    assert store.read_range(saved, file, len(data), 1) == b""
    with pytest.raises(NotFoundError):
        store.read_range(replace(saved, attempt="attempt-x"), file, 0, 1)
    if store.url.startswith("gs://"):  # the fake has no credentials; test_gcs.py tests signing
        with pytest.raises(StoreError, match=r"cannot sign adapter_model\.safetensors .*service account's"):
            store.signed_url(saved.path, saved.attempt, file, 60)
    else:
        assert store.signed_url(saved.path, saved.attempt, file, 60) is None


def test_late_deletion_leaves_a_newer_save(store: Store, meta: CheckpointMeta, make_state: Make, same: Same) -> None:
    first = store.save(RUN, "weights", "x", make_state(1), meta)
    second = store.save(RUN, "weights", "x", make_state(2), meta, overwrite=True)
    assert not store.delete(first.path, first.attempt)
    same(store.load(second.path)[0], make_state(2))
    assert store.delete(second.path, second.attempt)
    assert not store.delete(second.path, second.attempt)


def test_interrupted_deletion_is_completed(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    store.blobs.remove(f"runs/{RUN}/weights/x/commit.json")
    assert not store.delete(saved.path, saved.attempt)
    assert store.blobs.children(f"runs/{RUN}/weights/x/{saved.attempt}") == []


def test_a_damaged_commit_is_deleted_with_its_files(store: Store, meta: CheckpointMeta, make_state: Make) -> None:
    saved = store.save(RUN, "weights", "x", make_state(1), meta)
    store.blobs.remove(f"runs/{RUN}/weights/x/commit.json")
    store.blobs.create(f"runs/{RUN}/weights/x/commit.json", b"{")
    assert store.delete(saved.path, saved.attempt)
    assert store.blobs.children(f"runs/{RUN}/weights/x/{saved.attempt}") == []
