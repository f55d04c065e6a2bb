"""Uploaded images: each file is stored once and belongs to a project, and stored requests contain its bytes."""

from __future__ import annotations

import base64
from typing import Any

import orjson
import pytest
from tests.api.conftest import Running
from tests.api.test_futures import sampler

from tinkerflow.backend.core.errors import StoreAwayError
from tinkerflow.backend.journal import Journal
from tinkerflow.backend.store.uploaded_files import UploadedFiles
from tinkerflow.backend.wire import tinker_pb2 as pb

FILE = b"\x89PNG\r\n\x1a\n and more"


def sent(server: Running, file: bytes = FILE, key: str = "tml-test") -> Any:
    return server.http.post(f"{server.url}/api/v1/assets", content=file, headers={"X-API-Key": key})


def prompted(server: Running, name: str, seq: int, *locations: str, key: str = "tml-test") -> Any:
    """Sample from a prompt with these images, and return the stored body."""
    chunks = [{"type": "image_asset_pointer", "format": "png", "location": location} for location in locations]
    body = {"sampling_session_id": name, "seq_id": seq, "prompt": {"chunks": chunks}, "sampling_params": {"seed": 1}}
    request = server.post("asample", body, key).json()["request_id"]
    assert server.post("asample", body, key).json()["request_id"] == request
    found = server.journal.requests.payload(request)
    return None if found is None else orjson.loads(found)


def test_stored_request_contains_the_bytes_of_its_images(server: Running, journal: Journal) -> None:
    name = sampler(server)
    _, mine = journal.keys.create("us", "local")  # the key gets the project that made the sampler
    _, theirs = journal.keys.create("them", "team-them")
    server.clock.advance(60.0)  # so that the server looks for keys again
    kept = sent(server, key=mine).json()
    assert kept == {"asset_id": kept["asset_id"], "location": kept["location"], "size_bytes": len(FILE)}
    assert sent(server, key=mine).json() == kept
    foreign = sent(server, key=theirs).json()["location"]
    assert foreign != kept["location"]
    assert len(server.store.blobs.children(f"uploads/{kept['asset_id']}")) == 1
    stored = prompted(
        server, name, 0, kept["location"], foreign, "tinker://assets/asset-0", "http://127.0.0.1:1/cat.png", key=mine
    )
    data = [chunk.get("data") for chunk in stored["prompt"]["chunks"]]
    assert data == [base64.b64encode(FILE).decode(), None, None, None]
    delete = f"{server.url}/api/v1/assets/{kept['asset_id']}"
    statuses = [server.http.delete(delete, headers={"X-API-Key": key}).status_code for key in (theirs, mine, mine)]
    assert statuses == [404, 204, 404]
    assert server.store.blobs.children(f"uploads/{kept['asset_id']}") == []
    gone = prompted(server, name, 1, kept["location"], key=mine)
    assert "data" not in gone["prompt"]["chunks"][0]
    assert sent(server, key=mine).json() == kept


def test_project_sees_its_images_and_their_audit_entries(server: Running, journal: Journal) -> None:
    key, mine = journal.keys.create("us", "local")
    server.clock.advance(60.0)  # so that the server looks for keys again
    headers = {"X-API-Key": mine}
    older = sent(server, key=mine).json()
    server.clock.advance(1.0)
    newer = sent(server, FILE + b"!", key=mine).json()
    assert sent(server, key=mine).json() == older

    def get(path: str) -> Any:
        return server.http.get(f"{server.url}/api/v1/{path}", headers=headers).json()

    listed = get("assets")["assets"]
    assert [{**one, "created_at": None} for one in listed] == [{**one, "created_at": None} for one in (newer, older)]
    assert listed[0]["created_at"] > listed[1]["created_at"]
    assert get("assets?limit=1&offset=1")["assets"] == listed[1:]
    server.http.delete(f"{server.url}/api/v1/assets/{older['asset_id']}", headers=headers)
    assert get("assets")["assets"] == listed[:1]
    told = [entry for entry in get("audit")["entries"] if entry["event"].startswith("asset_")]
    assert [(entry["event"], entry["event_details"]["asset_id"]) for entry in told] == [
        ("asset_uploaded", older["asset_id"]),
        ("asset_uploaded", newer["asset_id"]),
        ("asset_deleted", older["asset_id"]),
    ]
    assert all(entry["event_details"]["key_id"] == key.id for entry in told)


def test_training_stores_image_bytes_and_names_an_invalid_location(server: Running) -> None:
    location, model = sent(server).json()["location"], server.model()

    def submitted(seq: int, location: str) -> str:
        message = pb.ForwardBackwardRequest(model_id=model, seq_id=seq, loss_fn="cross_entropy")
        message.data.add().model_input.add().image.data = location.encode()
        answer = server.http.post(
            f"{server.url}/api/v1/forward_backward",
            content=message.SerializeToString(),
            headers={"X-API-Key": "tml-test"},
        )
        return str(answer.json()["request_id"])

    good, bad = submitted(1, location), submitted(2, "tinker://assets/asset-0")
    stored = pb.ForwardBackwardRequest.FromString(server.journal.requests.payload(good) or b"")
    assert stored.data[0].model_input[0].image.data == FILE
    told = server.journal.results.get(bad, "local")
    assert told is not None and told.error is not None
    assert (
        "data[0].model_input.chunks[0].data is 'tinker://assets/asset-0': must be the location of an image"
        in told.error
    )


def test_unsupported_and_oversized_images_are_refused(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(max_body_bytes=2**16)
    assert "begins with b'GIF89a': must be a PNG or JPEG file" in sent(server, b"GIF89a").json()["detail"]
    monkeypatch.setattr("tinkerflow.api.routes.assets.MAX_ASSET_BYTES", 2**16 - 1)
    assert sent(server, FILE.ljust(2**16)).status_code == 413
    large, name = sent(server, FILE.ljust(40_000)).json()["location"], sampler(server)
    assert prompted(server, name, 0, large)["prompt"]["chunks"][0]["data"]
    chunk = {"type": "image_asset_pointer", "format": "png", "location": large}
    body = {"sampling_session_id": name, "seq_id": 1, "prompt": {"chunks": [chunk] * 2}, "sampling_params": {}}
    told = server.result(server.post("asample", body).json()["request_id"]).json()
    assert "uploaded images have 80000 bytes: must be at most 65536 (max_body_bytes)" in told["error"]
    monkeypatch.setattr("tinkerflow.api.submit.MAX_ASSETS", 1)
    body = {**body, "seq_id": 2, "prompt": {"chunks": [chunk, {**chunk, "location": "tinker://assets/asset-0"}]}}
    told = server.result(server.post("asample", body).json()["request_id"]).json()
    assert "the request names 2 uploaded images: must be at most 1" in told["error"]


def test_interrupted_deletion_leaves_no_location_without_a_file(server: Running, monkeypatch: Any) -> None:
    kept, name = sent(server).json(), sampler(server)
    delete = f"{server.url}/api/v1/assets/{kept['asset_id']}"

    def killed(*_: object) -> None:
        raise SystemError("cut off")

    with monkeypatch.context() as here:
        here.setattr("tinkerflow.backend.journal.assets.Assets.forget", killed)
        assert server.http.delete(delete, headers={"X-API-Key": "tml-test"}).status_code == 500
    assert "data" not in prompted(server, name, 0, kept["location"])["prompt"]["chunks"][0]
    assert sent(server).json() == kept
    assert "data" in prompted(server, name, 1, kept["location"])["prompt"]["chunks"][0]


def test_image_that_the_store_refused_does_not_count(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    server = start(max_images=1)

    def refuse(*_: object) -> None:
        raise StoreAwayError("no space left")

    with monkeypatch.context() as here:
        here.setattr(UploadedFiles, "write_piece", refuse)
        assert sent(server).status_code == 503
    assert sent(server, FILE + b"!").status_code == 200
    assert sent(server).status_code == 400


def test_file_deleted_during_its_upload_leaves_nothing(server: Running, monkeypatch: Any) -> None:
    kept = sent(server).json()
    delete, files = f"{server.url}/api/v1/assets/{kept['asset_id']}", f"uploads/{kept['asset_id']}"
    server.http.delete(delete, headers={"X-API-Key": "tml-test"})
    write = UploadedFiles.write_piece

    def deleted(self: UploadedFiles, asset_id: str, *given: Any) -> None:
        server.journal.assets.forget(asset_id, "local")
        write(self, asset_id, *given)

    monkeypatch.setattr(UploadedFiles, "write_piece", deleted)
    assert sent(server).status_code == 404
    assert server.store.blobs.children(files) == []


def test_escaped_field_names_are_read_and_a_location_with_nul_is_refused(server: Running) -> None:
    location, name = sent(server).json()["location"], sampler(server)
    chunks = [{"type": "image_asset_pointer", "format": "png", "location": one} for one in (location, f"{location}\0")]
    body = {"sampling_session_id": name, "seq_id": 0, "prompt": {"chunks": chunks}, "sampling_params": {}}
    escaped = orjson.dumps(body).replace(b"image_asset", rb"image\u005fasset")
    answer = server.http.post(f"{server.url}/api/v1/asample", content=escaped, headers={"X-API-Key": "tml-test"})
    stored = orjson.loads(server.journal.requests.payload(answer.json()["request_id"]) or b"{}")
    assert ["data" in chunk for chunk in stored["prompt"]["chunks"]] == [True, False]
