"""Uploads of adapters trained elsewhere, over HTTP: links, files in pieces, and the resulting checkpoint or error."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import safetensors.numpy
from tests.api.conftest import BASE, Running, card_json
from tests.catalog.test_peft_import import CONFIG, DENSE, tensors
from tests.waiting import wait_for

from tinkerflow.api.routes import uploads
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.catalog.peft_import import largest_size
from tinkerflow.backend.core.errors import ServerError
from tinkerflow.backend.journal import Journal
from tinkerflow.backend.journal.uploads import MOST_OPEN
from tinkerflow.backend.spec.commands import LoraSpec
from tinkerflow.backend.store import Store
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG
from tinkerflow.flows.sweeps import delete_uploads

START, FINISH = "external_weights_upload_start", "external_weights_upload_finish"
ASKED = {"base_model": BASE, "lora_config": {"rank": 4}}
FILES = {
    ADAPTER_CONFIG: json.dumps({"peft_type": "LORA", "r": 4, "lora_alpha": 32}).encode(),
    ADAPTER: safetensors.numpy.save(tensors()),
}


@pytest.fixture(autouse=True)
def real_model(journal: Journal, tmp_path: Path) -> None:
    """The base model has a folder with a config."""
    folder = tmp_path / "tiny"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    card = replace(ModelCard.from_json(card_json()), path=str(folder))
    journal.base_models.register([(BASE, card.to_json())])


def begun(server: Running, key: str = "tml-test", **changes: Any) -> dict[str, Any]:
    answer = server.post(START, {**ASKED, **changes}, key)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def sent(upload: dict[str, Any], files: dict[str, bytes] = FILES) -> None:
    for file, data in files.items():
        answer = httpx.put(upload["urls"][file], content=data)
        assert answer.status_code == 200, answer.text


def pieces(server: Running, upload: dict[str, Any]) -> list[str]:
    return server.store.blobs.children(f"uploads/{upload['upload_id']}")


def test_an_upload_becomes_a_checkpoint_that_can_be_trained_on(
    server: Running, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(uploads, "_PIECE", 1000)
    upload = begun(server)
    assert set(upload) == {"upload_id", "urls", "expires"} and set(upload["urls"]) == set(FILES)
    sent(upload, {**FILES, ADAPTER: b"half"})
    sent(upload)
    assert len(pieces(server, upload)) > 2
    body = {"upload_id": upload["upload_id"]}
    path = server.post(FINISH, body).json()["tinker_path"]
    state, saved = server.store.load(path)
    assert state.spec == LoraSpec(4) and saved.meta.base_model == BASE
    for name, array in tensors().items():
        np.testing.assert_array_equal(state.weights[name], array)
    assert pieces(server, upload) == []
    assert server.post(FINISH, body).json()["tinker_path"] == path  # as a client repeats it after a lost answer
    info = server.post("weights_info", {"tinker_path": path}).json()
    assert (info["base_model"], info["lora_rank"]) == (BASE, 4)
    load = {"session_id": server.session(), "model_seq_id": 0, "path": path}
    assert server.post("load_weights", load).status_code == 200
    late = httpx.put(upload["urls"][ADAPTER], content=b"x")
    assert late.status_code == 422 and "is already finished as" in late.text


def test_refused_files_can_be_replaced(server: Running) -> None:
    upload = begun(server)
    body = {"upload_id": upload["upload_id"]}
    early = server.post(FINISH, body)
    assert early.status_code == 400 and "adapter_config.json was not uploaded" in early.text
    sent(upload, {**FILES, ADAPTER_CONFIG: b'{"r": 4, "use_dora": true}'})
    refused = server.post(FINISH, body)
    assert refused.status_code == 400 and "use_dora is True: must be left out" in refused.text
    sent(upload, {ADAPTER_CONFIG: FILES[ADAPTER_CONFIG]})
    assert server.post(FINISH, body).status_code == 200


def test_upload_replaces_the_files_of_an_interrupted_finish(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    upload = begun(server)
    sent(upload)
    body = {"upload_id": upload["upload_id"]}

    def killed(*_: object) -> None:
        raise ServerError("cut off")

    with monkeypatch.context() as here:
        here.setattr("tinkerflow.backend.journal.uploads.Uploads.finish", killed)
        for _ in range(2):
            assert server.post(FINISH, body).status_code == 503
    doubled = {name: 2 * array for name, array in tensors().items()}
    sent(upload, {ADAPTER: safetensors.numpy.save(doubled)})
    path = server.post(FINISH, body).json()["tinker_path"]
    assert server.post(FINISH, body).json()["tinker_path"] == path
    state, _ = server.store.load(path)
    for name, array in doubled.items():
        np.testing.assert_array_equal(state.weights[name], array)
    assert [one.path for one in server.store.checkpoints()] == [path]


def test_upload_link_is_bound_to_one_file_and_its_size(server: Running) -> None:
    first, second = begun(server), begun(server)
    forged = first["urls"][ADAPTER].replace(first["upload_id"], second["upload_id"])
    assert httpx.put(forged, content=b"x").status_code == 403
    assert httpx.put(first["urls"][ADAPTER].replace(ADAPTER, "other"), content=b"x").status_code == 403
    large = httpx.put(first["urls"][ADAPTER_CONFIG], content=b" " * (2**20 + 1))
    assert large.status_code == 413 and "adapter_config.json is too large: must have at most 1048576" in large.text
    assert pieces(server, first) == []
    packed = httpx.put(first["urls"][ADAPTER], content=b"x", headers={"content-encoding": "gzip"})
    assert packed.status_code == 400 and "Content-Encoding is 'gzip'" in packed.text


def test_uploads_count_against_the_projects_limits(start: Callable[..., Running]) -> None:
    most = 5 * largest_size(DENSE, LoraSpec(4)) // 2
    server = start(max_stored_bytes=most)
    begun(server)
    begun(server)
    full = server.post(START, ASKED)
    assert full.status_code == 400 and f"together they must be at most {most} (max_stored_bytes)" in full.text


def test_upload_of_an_admin_counts_against_the_limits_of_the_other_project(server: Running) -> None:
    _, admin = server.journal.keys.create("admin", "local", admin=True)
    server.journal.keys.create("other", "small")
    server.clock.advance(1.0)  # so that the server looks for keys again
    server.journal.project_limits.set("local", {"max_stored_bytes": 1})
    begun(server, admin, destination_project_id="small")
    server.journal.project_limits.set("small", {"max_stored_bytes": 1})
    assert server.post(START, {**ASKED, "destination_project_id": "small"}, admin).status_code == 400


def test_number_of_open_uploads_is_limited(server: Running) -> None:
    for _ in range(MOST_OPEN):
        begun(server)
    answer = server.post(START, ASKED)
    assert answer.status_code == 400 and f"must be fewer than {MOST_OPEN}" in answer.text
    server.clock.advance(3601)
    assert server.post(START, ASKED).status_code == 400  # they are still open by the journal's clock


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"base_model": "none"}, "none"),
        ({"lora_config": {"rank": 0}}, "rank"),
        ({"lora_config": {"train_attn": False, "train_mlp": False, "train_unembed": False}}, "at least one"),
    ],
)
def test_invalid_upload_is_refused_at_the_start(server: Running, change: dict[str, Any], message: str) -> None:
    answer = server.post(START, {**ASKED, **change})
    assert answer.status_code in (400, 404) and message in answer.text


def test_expired_upload_is_deleted(server: Running, journal: Journal) -> None:
    """The files of an expired upload are kept for an hour."""
    upload = begun(server)
    sent(upload)
    server.clock.advance(3601)
    assert httpx.put(upload["urls"][ADAPTER], content=b"x").status_code == 403
    answer = server.post(FINISH, {"upload_id": upload["upload_id"]})
    assert answer.status_code == 400 and "has expired at" in answer.text
    delete_uploads(journal, server.store)
    assert pieces(server, upload)  # another process may work on it for up to an hour
    later = Journal.open(server.settings.journal_url, clock=server.clock)
    server.clock.advance(3600)
    delete_uploads(later, server.store)
    later.close()
    assert pieces(server, upload) == []
    assert server.post(FINISH, {"upload_id": upload["upload_id"]}).status_code == 404


def test_upload_survives_a_kill_between_commit_and_rows(
    server: Running, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = begun(server)
    sent(upload)
    body, finish = {"upload_id": upload["upload_id"]}, type(journal.uploads).finish

    def killed(*_: Any) -> str:
        raise ServerError("killed")

    monkeypatch.setattr(type(journal.uploads), "finish", killed)
    assert server.post(FINISH, body).status_code == 503
    (committed,) = server.store.checkpoints()
    assert server.post("weights_info", {"tinker_path": committed.path}).status_code == 404
    monkeypatch.setattr(type(journal.uploads), "finish", finish)
    assert server.post(FINISH, body).json()["tinker_path"] == committed.path
    assert [saved.attempt for saved in server.store.checkpoints()] == [committed.attempt]


def test_second_put_of_a_file_aborts_the_first(server: Running, journal: Journal) -> None:
    upload = begun(server)
    here = upload["upload_id"]

    def slowly() -> Any:
        yield FILES[ADAPTER][:100]
        wait_for(lambda: journal.uploads.get(here, None).files)
        journal.uploads.begin_file(here, ADAPTER, f"{ADAPTER}@newer")  # as another process of the API does
        yield FILES[ADAPTER][100:]

    answer = httpx.put(upload["urls"][ADAPTER], content=slowly())
    assert answer.status_code == 422 and "only the newest one counts" in answer.text
    assert pieces(server, upload) == []
    assert Store.open(server.settings.store_url).upkeep.paths() == []


def test_a_project_has_one_upload_in_the_queue(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other projects wait for at most one finish of this project."""
    running, most, finish = [], [], uploads._finish

    def slow(call: Any, upload_id: str) -> str:
        running.append(upload_id)
        most.append(len(running))
        time.sleep(0.02)
        try:
            return finish(call, upload_id)
        finally:
            running.remove(upload_id)

    monkeypatch.setattr(uploads, "_finish", slow)
    begins = [begun(server) for _ in range(3)]
    for upload in begins:
        sent(upload)
    with ThreadPoolExecutor(6) as threads:
        bodies = [{"upload_id": upload["upload_id"]} for upload in begins] * 2
        answers = list(threads.map(lambda body: server.post(FINISH, body).status_code, bodies))
    assert answers == [200] * 6 and max(most) == 1
