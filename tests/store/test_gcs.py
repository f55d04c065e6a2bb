"""gs:// with errors, lost answers and truncated bodies, with large objects, and with signed links."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import gcsfs.retry
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from tests.store.fake_gcs import FakeGcs, Fault

from tinkerflow.backend.spec.commands import AdapterState
from tinkerflow.backend.store import CheckpointMeta, Store
from tinkerflow.backend.store import gcs as gcs_module
from tinkerflow.backend.store.gcs import GcsBlobs

Make = Callable[..., AdapterState]
Same = Callable[[AdapterState, AdapterState], None]


@pytest.fixture
def bad(gcs: FakeGcs, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeGcs]:
    """The fake without gcsfs's pauses between tries. Its faults are removed afterwards."""

    async def at_once(seconds: float) -> None:
        assert 0 < seconds <= 33

    monkeypatch.setattr(gcsfs.retry, "asyncio", SimpleNamespace(sleep=at_once))
    gcs.requests.clear()
    yield gcs
    gcs.faults.clear()


@pytest.fixture
def blobs(bad: FakeGcs) -> GcsBlobs:
    return GcsBlobs(f"bucket/{uuid.uuid4().hex}")


FAULTS = [{"status": 503}, {"status": 429}, {"before": True}, {"after": True}]


@pytest.mark.parametrize("fault", FAULTS)
def test_failed_write_is_retried_and_recognizes_its_object(
    bad: FakeGcs, blobs: GcsBlobs, fault: dict[str, int]
) -> None:
    bad.faults = [Fault("POST", "/upload/", times=2, **fault)]
    blobs.create("a", b"one")
    assert bad.faults == []
    assert blobs.read("a") == b"one"
    bad.faults = [Fault("POST", "/upload/", **fault)]
    assert blobs.replace("a", b"one", b"two")
    assert blobs.read("a") == b"two"
    bad.faults = [Fault("POST", "/upload/", **fault)]
    with pytest.raises(FileExistsError):
        blobs.create("a", b"three")
    assert blobs.read("a") == b"two"


@pytest.mark.parametrize("fault", [{"status": 503}, {"before": True}, {"cut": 2}])
def test_failed_read_is_retried_and_complete(bad: FakeGcs, blobs: GcsBlobs, fault: dict[str, int]) -> None:
    blobs.create("a", b"one two")
    bad.faults = [Fault("GET", "alt=media", times=2, **fault)]
    assert blobs.read("a") == b"one two"
    assert bad.faults == []
    bad.faults = [Fault("GET", "alt=media", **fault)]
    assert blobs.read_range("a", 4, 2) == b"tw"


def test_retries_are_bounded_and_raise_the_last_error(bad: FakeGcs, blobs: GcsBlobs) -> None:
    bad.faults = [Fault("POST", "/upload/", status=503, times=1000)]
    with pytest.raises(OSError, match="a: HttpError: injected, 503"):
        blobs.create("a", b"one")
    assert sum("/upload/" in request for request in bad.requests) == 6
    bad.faults = [Fault("GET", status=403)]
    with pytest.raises(OSError, match="Forbidden"):
        blobs.read("a")


def test_multipart_boundary_inside_data_is_kept(blobs: GcsBlobs) -> None:
    data = b"before\n--==0==--\nafter"
    blobs.create("a", data)
    assert blobs.read("a") == data


@pytest.mark.parametrize("fault", [None, *FAULTS])
def test_large_objects_are_sent_in_pieces_that_are_tried_again(
    bad: FakeGcs, blobs: GcsBlobs, fault: dict[str, int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_module, "RESUMABLE", 2**18)
    data = os.urandom(2**18 * 3 + 7)
    bad.faults = [Fault("POST", "upload_id", times=2, **fault)] if fault else []
    blobs.create("a", data)
    assert bad.faults == []
    assert blobs.read("a") == data
    assert sum("upload_id" in request for request in bad.requests) == 4 + (2 if fault else 0)
    with pytest.raises(FileExistsError):
        blobs.create("a", data[::-1])


def test_large_object_with_a_lost_last_answer_is_recognized(
    bad: FakeGcs, blobs: GcsBlobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gcs_module, "RESUMABLE", 2**18)
    data = os.urandom(2**18)
    bad.faults = [Fault("POST", "upload_id", after=True)]
    blobs.create("a", data)
    blobs.create("a", data)  # the same writer, restarted, finds its own bytes
    assert blobs.read("a") == data


def test_listings_have_pages(blobs: GcsBlobs) -> None:
    names = [f"{i:02}" for i in range(11)]
    for name in names:
        blobs.create(f"d/{name}/x", b"")
    assert blobs.children("d") == names


@pytest.mark.parametrize("fault", FAULTS)
def test_store_works_over_a_bad_connection(
    bad: FakeGcs, meta: CheckpointMeta, make_state: Make, same: Same, fault: dict[str, int]
) -> None:
    store = Store.open(f"gs://bucket/{uuid.uuid4().hex}")
    bad.faults = [Fault(method, **fault) for method in ("POST", "GET", "POST", "GET", "POST", "POST")]
    saved = store.save("run", "weights", "x", make_state(1), meta)
    same(store.load(saved.path)[0], make_state(1))
    bad.faults = [Fault("POST", **fault)] * 3
    store.save("run", "weights", "x", make_state(2), meta, overwrite=True)
    same(store.load(saved.path)[0], make_state(2))
    assert store.checkpoints() == [store.find(saved.path)]


def test_a_service_account_signs_links(
    gcs: FakeGcs, blobs: GcsBlobs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(OSError, match="cannot sign URLs: use a service account's"):
        blobs.signed_url("a", 60)
    key = rsa.generate_private_key(public_exponent=65537, key_size=2048).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    account = {"type": "service_account", "client_email": "me@here", "private_key": key.decode(), "project_id": "p"}
    file = tmp_path / "key.json"
    file.write_text(json.dumps(account | {"token_uri": f"{gcs.url}/token", "private_key_id": "1"}))
    code = "from tinkerflow.backend.store.gcs import GcsBlobs; print(GcsBlobs('bucket/p').signed_url('a b', 60))"
    env = {name: value for name, value in os.environ.items() if name != "STORAGE_EMULATOR_HOST"}
    env |= {"GOOGLE_APPLICATION_CREDENTIALS": str(file)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=False)
    url = urlsplit(done.stdout.strip())
    assert url.path.endswith("/p/a%20b"), done.stderr
    query = parse_qs(url.query)
    assert query["X-Goog-Expires"] == ["60"]
    assert query["X-Goog-Credential"][0].startswith("me@here/")


def test_other_stores_do_not_import_gcsfs(tmp_path: Path) -> None:
    code = (
        "import sys; from tinkerflow.backend.store import Store; "
        f"Store.open('file://{tmp_path}'); print('gcsfs' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_importing_the_store_leaves_fsspecs_gs_filesystem_unchanged() -> None:
    """Pipelines read data with it, and Prefect stores results with it."""
    code = "import tinkerflow.backend.store, fsspec; print(type(fsspec.filesystem('gs', token='anon')).__name__)"
    env = {name: value for name, value in os.environ.items() if not name.startswith("GCSFS_")}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "GCSFileSystem"
