"""Saved checkpoints through the SDK: publication, copies, exports, downloads and TTLs."""

from __future__ import annotations

import io
import json
import tarfile
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from email.utils import parsedate_to_datetime
from typing import Any

import httpx
import pyrage
import pytest
import tinker
from safetensors.numpy import load as load_safetensors
from tinker import types

BASE = "tiny/bigram"
CONFIG, ADAPTER = "adapter_config.json", "adapter_model.safetensors"


class Person:
    """A key, and SDK clients that use it."""

    def __init__(self, server: Any, secret: str) -> None:
        self.server, self.secret = server, secret
        self.rest = tinker.RestClient(base_url=server.url, api_key=secret)
        self.service = tinker.ServiceClient(base_url=server.url, api_key=secret)

    def train(self) -> tinker.TrainingClient:
        model = self.service.create_lora_training_client(BASE, rank=8).result()
        targets = {"target_tokens": [4, 5, 6], "weights": [1.0] * 3}
        datum = types.Datum(model_input=types.ModelInput.from_ints([3, 4, 5]), loss_fn_inputs=targets)
        model.forward_backward([datum], "cross_entropy").result()
        model.optim_step(types.AdamParams(learning_rate=1.0)).result()
        return model

    def request(self, method: str, path: str, **more: Any) -> httpx.Response:
        headers = {"X-API-Key": self.secret, **more.pop("headers", {})}
        url = f"{self.server.url}/api/v1/{path}"
        return self.server.http.request(method, url, headers=headers, follow_redirects=False, **more)

    def one(self, path: str) -> str:
        run, kind, name = path.removeprefix("tinker://").split("/")
        return f"training_runs/{run}/checkpoints/{kind}/{name}"


@pytest.fixture
def people(server: Any, engine: Any, journal: Any) -> Iterator[Callable[[str], Person]]:
    """people(name): `ann` or `bob`, with a project each, or `root`, an admin in a third project."""
    projects = {"ann": "team-a", "bob": "team-b", "root": "team-c"}
    secrets = {name: journal.keys.create(name, team, admin=name == "root")[1] for name, team in projects.items()}
    server.clock.advance(1.0)  # so that the server looks for keys again
    made: list[Person] = []

    def person(name: str) -> Person:
        made.append(Person(server, secrets[name]))
        return made[-1]

    yield person
    for one in made:
        one.service.close("success").result()


def logprobs(sampler: tinker.SamplingClient) -> list[float | None]:
    return list(sampler.compute_logprobs(types.ModelInput.from_ints([3, 4, 5, 6])).result())


def events(server: Any, owner: str) -> list[str]:
    return [entry.event for entry in server.journal.audit.entries(owner, resource="checkpoint")]


def test_published_checkpoints_are_readable_by_all_and_changed_by_their_owner(people: Any) -> None:
    ann, bob = people("ann"), people("bob")
    model = ann.train()
    path = model.save_state("ck").result().path
    for_sampling = model.save_weights_for_sampler("s").result().path
    for hidden in (path, for_sampling):
        with pytest.raises(tinker.NotFoundError):
            bob.rest.get_weights_info_by_tinker_path(hidden).result()
        for _ in range(2):  # repeated calls succeed
            ann.rest.publish_checkpoint_from_tinker_path(hidden).result()
    assert [c.public for c in ann.rest.list_user_checkpoints().result().checkpoints] == [True, True]
    info = bob.rest.get_weights_info_by_tinker_path(path).result()
    assert (info.base_model, info.lora_rank, info.is_lora) == (BASE, 8, True)
    mine = logprobs(ann.service.create_sampling_client(model_path=for_sampling).result())
    assert logprobs(bob.service.create_sampling_client(model_path=for_sampling).result()) == mine
    resumed = bob.service.create_training_client_from_state(path).result()
    assert resumed.save_state("mine").result().path != path
    assert {c.tinker_path for c in bob.rest.list_user_checkpoints().result().checkpoints}.isdisjoint({path})
    for _ in range(2):
        ann.rest.unpublish_checkpoint_from_tinker_path(path).result()
    with pytest.raises(tinker.RequestFailedError, match="does not exist"):
        bob.service.create_training_client_from_state(path).result()
    log = events(ann.server, "team-a")
    assert log.count("checkpoint_published") == 4 and log.count("checkpoint_unpublished") == 2


def test_a_ttl_is_set_cleared_and_bounded(people: Any) -> None:
    ann = people("ann")
    model = ann.train()
    path = model.save_state("ck", ttl_seconds=3600).result().path

    def expires() -> datetime | None:
        (found,) = ann.rest.list_user_checkpoints().result().checkpoints
        return found.expires_at

    first = expires()
    assert first is not None and abs((first - datetime.now(UTC)).total_seconds() - 3600) < 30
    ann.rest.set_checkpoint_ttl_from_tinker_path(path, 7200).result()
    later = expires()
    assert later is not None and later - first > timedelta(seconds=3500)
    ann.rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert expires() is None
    with pytest.raises(tinker.BadRequestError, match=r"ttl_seconds is 60: must be a whole number from 3600"):
        ann.rest.set_checkpoint_ttl_from_tinker_path(path, 60).result()
    assert ann.request("PUT", ann.one(path) + "/ttl", json={}).status_code == 400
    with pytest.raises(tinker.RequestFailedError, match="ttl_seconds is 60"):
        model.save_state("short", ttl_seconds=60).result()
    ann.server.journal.checkpoints.set_ttl(path, "team-a", 0)
    assert ann.rest.list_user_checkpoints().result().checkpoints == []
    assert model.save_state("ck").result().path == path  # the expired checkpoint's name is free


def test_overwriting_replaces_bytes_metadata_ttl_and_publication(people: Any) -> None:
    ann = people("ann")
    model = ann.train()
    path = model.save_state("ck", ttl_seconds=3600, user_metadata={"a": "1"}).result().path
    ann.rest.publish_checkpoint_from_tinker_path(path).result()
    model.optim_step(types.AdamParams(learning_rate=1.0)).result()
    assert model.save_state("ck", overwrite=True).result().path == path
    (found,) = ann.rest.list_user_checkpoints().result().checkpoints
    assert (found.user_metadata, found.expires_at, found.public) == ({}, None, False)


def test_own_public_and_shared_checkpoints_can_be_copied(people: Any) -> None:
    ann, bob = people("ann"), people("bob")
    model = ann.train()
    path = model.save_weights_for_sampler("s").result().path
    expected = logprobs(ann.service.create_sampling_client(model_path=path).result())
    own = ann.rest.copy_weights(path, "archive", ttl_seconds=3600).result()
    assert own != path and own.endswith("/sampler_weights/s")
    copied = next(c for c in ann.rest.list_user_checkpoints().result().checkpoints if c.tinker_path == own)
    assert copied.expires_at is not None and copied.size_bytes > 0
    run = ann.rest.get_training_run_by_tinker_path(own).result()
    assert (run.base_model, run.lora_rank) == (BASE, 8)
    assert [r.training_run_id for r in ann.rest.list_training_runs(project_id="archive").result().training_runs] == [
        run.training_run_id
    ]

    with pytest.raises(tinker.NotFoundError):
        bob.rest.copy_weights(path, "team-b").result()
    _, token = ann.server.journal.shares.create(path, "team-a")
    with pytest.raises(tinker.NotFoundError):
        bob.rest.copy_weights(path, "team-b", weights_access_token=token + "x").result()
    mine = bob.rest.copy_weights(path, "team-b", weights_access_token=token).result()
    ann.rest.delete_checkpoint_from_tinker_path(path).result()
    assert logprobs(bob.service.create_sampling_client(model_path=mine).result()) == expected
    with pytest.raises(tinker.NotFoundError):
        ann.rest.get_weights_info_by_tinker_path(mine).result()
    assert "checkpoint_copied" in events(bob.server, "team-b")
    body = {"model_id": mine.split("/")[2], "seq_id": 1, "path": "x"}
    request_id = bob.request("POST", "save_weights", json=body).json()["request_id"]
    assert f"is a copy of {path}" in bob.server.result(request_id, bob.secret).json()["error"]


def test_access_token_loads_into_a_new_model_and_is_never_stored(people: Any, tmp_path: Any) -> None:
    ann, bob = people("ann"), people("bob")
    path = ann.train().save_state("ck").result().path
    share, token = ann.server.journal.shares.create(path, "team-a")
    loaded = bob.service.create_training_client_from_state(path, weights_access_token=token).result()
    assert loaded.get_info().lora_rank == 8
    files = b"".join(file.read_bytes() for file in tmp_path.glob("journal.db*"))
    assert token.encode() not in files
    ann.server.journal.shares.revoke(share.id)
    with pytest.raises(tinker.RequestFailedError, match="does not exist"):
        bob.service.create_training_client_from_state(path, weights_access_token=token).result()


def test_repeated_copy_is_idempotent_and_other_projects_are_refused(people: Any) -> None:
    ann, bob, root = people("ann"), people("bob"), people("root")
    path = ann.train().save_state("ck").result().path
    ann.rest.publish_checkpoint_from_tinker_path(path).result()
    key = str(uuid.uuid4())

    def copy(who: Person, project: str, key: str) -> str:
        body = {"source_path": path, "destination_project_id": project}
        answer = who.request("POST", "copy_weights", json=body, headers={"X-Idempotency-Key": key})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["tinker_path"])

    first = copy(bob, "team-b", key)
    assert copy(bob, "team-b", key) == first
    other = str(uuid.uuid4())
    gone = copy(bob, "team-b", other)
    assert gone != first
    bob.rest.delete_checkpoint_from_tinker_path(gone).result()
    assert bob.server.store.delete(gone)  # as the sweep does
    assert copy(bob, "team-b", other) == gone
    assert not bob.server.store.exists(gone), "no row would describe it, and no sweep would remove it"
    assert copy(bob, "team-b", str(uuid.uuid4())) not in (first, gone)
    assert len(bob.rest.list_user_checkpoints().result().checkpoints) == 2
    copy(bob, "team-a", key)  # only a label: the copy belongs to bob's project
    assert len(ann.rest.list_user_checkpoints().result().checkpoints) == 1
    assert len(bob.rest.list_user_checkpoints().result().checkpoints) == 3
    given = copy(root, "team-a", key)  # an admin's key may copy into any project that has keys
    assert given in {c.tinker_path for c in ann.rest.list_user_checkpoints().result().checkpoints}
    wrong = ann.request("POST", "copy_weights", json={"source_path": path, "ttl_seconds": 1})
    assert (wrong.status_code, "ttl_seconds is 1" in wrong.text) == (400, True)
    traversal = ann.request("POST", "copy_weights", json={"source_path": "tinker://a/weights/../../x"})
    assert traversal.status_code == 400


def test_exports_are_downloaded_by_link_whole_and_in_ranges(people: Any) -> None:
    ann = people("ann")
    model = ann.train()
    path = model.save_weights_external("out", ttl_seconds=3600).result().path
    (listed,) = ann.rest.list_user_checkpoints().result().checkpoints
    assert (listed.checkpoint_type, listed.tinker_path) == ("external", path)
    assert ann.rest.get_weights_info_by_tinker_path(path).result().base_model == BASE
    urls = ann.rest.get_external_weights_urls(path).result()
    assert set(urls.urls) == {CONFIG, ADAPTER}
    url, http = urls.urls[ADAPTER], ann.server.http
    assert ann.secret not in url
    whole = http.get(url)
    assert whole.status_code == 200 and int(whole.headers["content-length"]) == len(whole.content)
    assert len(load_safetensors(whole.content)) == 1
    assert json.loads(http.get(urls.urls[CONFIG]).content)["base_model_name_or_path"] == BASE
    head = http.head(url)
    assert (head.status_code, head.headers["content-length"], head.content) == (200, str(len(whole.content)), b"")
    size = len(whole.content)
    for asked, start, end in (("bytes=0-9", 0, 10), ("bytes=10-", 10, size), ("bytes=-7", size - 7, size)):
        part = http.get(url, headers={"Range": asked})
        assert part.status_code == 206 and part.content == whole.content[start:end]
        assert part.headers["content-range"] == f"bytes {start}-{end - 1}/{size}"
    assert http.get(url, headers={"Range": f"bytes={size}-"}).status_code == 416
    for ignored in ("bytes=5-2", "bytes=0-1,4-5", "lines=1-2"):
        assert http.get(url, headers={"Range": ignored}).content == whole.content
    assert http.get(url, headers={"Range": "bytes=0-1", "If-Range": '"other"'}).content == whole.content

    saved = ann.server.store.find(path)
    key = f"runs/{model.model_id}/external_weights/out/{saved.attempt}/{ADAPTER}"
    ann.server.store.blobs.remove(key)
    ann.server.store.blobs.create(key, whole.content[:-1] + b"?")
    with pytest.raises(httpx.RemoteProtocolError, match="without sending complete message body"):
        http.get(url)
    other = url.replace(ADAPTER, CONFIG)
    assert http.get(other).status_code == http.get(url.split("?")[0]).status_code == 403
    ann.server.clock.advance(3601)
    late = http.get(url)
    assert late.status_code == 403 and "expired" in late.json()["detail"]
    assert ann.request("GET", ann.one(model.save_state("ck").result().path) + "/external_weights_urls").is_client_error


def test_a_link_ends_with_its_checkpoint(people: Any) -> None:
    ann = people("ann")
    model = ann.train()
    path = model.save_weights_external("out").result().path
    url = ann.rest.get_external_weights_urls(path).result().urls[ADAPTER]
    ann.rest.delete_checkpoint_from_tinker_path(path).result()
    assert ann.server.http.get(url).status_code == 404
    assert model.save_weights_external("out").result().path == path
    anew = ann.server.http.get(url)
    assert anew.status_code == 404 and "replaced by a new save" in anew.json()["detail"]


def test_encrypted_exports_are_downloaded_and_decrypted(people: Any) -> None:
    ann = people("ann")
    identity = pyrage.x25519.Identity.generate()
    model = ann.train()
    path = model.save_weights_external("out", age_encryption_recipients=[str(identity.to_public())]).result().path
    urls = ann.rest.get_external_weights_urls(path).result().urls
    assert set(urls) == {CONFIG + ".age", ADAPTER + ".age"}
    sealed = ann.server.http.get(urls[CONFIG + ".age"]).content
    assert b"base_model" not in sealed
    assert json.loads(pyrage.decrypt(sealed, [identity]))["r"] == 8
    with pytest.raises(tinker.RequestFailedError, match=r"age_encryption_recipients\[0\] is 'nobody'"):
        model.save_weights_external("bad", age_encryption_recipients=["nobody"]).result()
    with pytest.raises(tinker.RequestFailedError, match="at most 10"):
        model.save_weights_external("bad", age_encryption_recipients=[str(identity.to_public())] * 11).result()
    with pytest.raises(tinker.RequestFailedError, match="external weights are for downloads"):
        ann.service.create_training_client_from_state(path).result()
    with pytest.raises(tinker.BadRequestError, match="external weights are for downloads"):
        ann.service.create_sampling_client(model_path=path).result()


def test_the_older_archive_route_redirects_to_a_tar(people: Any) -> None:
    ann = people("ann")
    path = ann.train().save_state("ck").result().path
    answer = ann.request("GET", ann.one(path) + "/archive")
    assert answer.status_code == 302
    due = parsedate_to_datetime(answer.headers["expires"])
    assert abs((due - ann.server.clock.now() - timedelta(hours=1)).total_seconds()) <= 1  # HTTP dates have no fractions
    url = answer.headers["location"]
    whole = ann.server.http.get(url)
    assert (
        int(whole.headers["content-length"])
        == len(whole.content)
        == int(ann.server.http.head(url).headers["content-length"])
    )
    with tarfile.open(fileobj=io.BytesIO(whole.content)) as tar:
        assert sorted(tar.getnames()) == [CONFIG, ADAPTER, "checkpoint_complete"]
        file = tar.extractfile(CONFIG)
        assert file is not None and json.loads(file.read())["peft_type"] == "LORA"
    middle = ann.server.http.get(url, headers={"Range": "bytes=500-1500"})
    assert middle.content == whole.content[500:1501]
    assert "checkpoint_read" in events(ann.server, "team-a")


def test_copy_counts_against_the_storage_of_its_destination(start: Any, engine: Any) -> None:
    server = start(max_stored_bytes=1)
    model = server.model()
    saved = server.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}).json()["request_id"]
    answer = server.post("copy_weights", {"source_path": server.result(saved).json()["path"]})
    assert answer.status_code == 400 and "(max_stored_bytes); delete some" in answer.json()["detail"]
    assert server.journal.checkpoints.page("local").total == 1


def test_copy_of_an_admin_counts_against_the_limits_of_the_other_project(start: Any, engine: Any) -> None:
    server = start()
    model = server.model()
    saved = server.post("save_weights", {"model_id": model, "seq_id": 1, "path": "a"}).json()["request_id"]
    copy = {"source_path": server.result(saved).json()["path"], "destination_project_id": "small"}
    keys, limits = server.journal.keys, server.journal.project_limits
    _, admin = keys.create("admin", "local", admin=True)
    keys.create("other", "small")
    server.clock.advance(1.0)  # so that the server looks for keys again
    limits.set("local", {"max_training_runs": 1})
    assert server.post("copy_weights", copy, admin).status_code == 200
    limits.set("small", {"max_stored_bytes": 1})
    answer = server.post("copy_weights", copy, admin)
    assert answer.status_code == 400 and "must be below 1 to save more (max_stored_bytes)" in answer.json()["detail"]
