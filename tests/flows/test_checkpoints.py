"""Checkpoints on a real journal and store: exports, reused names, access tokens, and the sweep that deletes files."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import fields
from typing import Any

import numpy as np
import orjson
import pyrage
import pytest
from safetensors.numpy import load as load_safetensors

from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.journal import CheckpointSaved, Kind, Retention, access_hash
from tinkerflow.backend.wire import hash_token
from tinkerflow.flows.prefect.mirror import Mirror
from tinkerflow.flows.sweeps import delete_checkpoints, write_changes


@pytest.fixture
async def model(make_runner: Any, client: Any, running: Any) -> AsyncIterator[str]:
    """A served model after one step."""
    name, request = client.submit_create()
    runner = make_runner(name)
    async with running(runner.serve()), running(client.ring("model:", runner)):
        assert (await client.result(request)).error is None
        await client.results(client.forward_backward(name, [5, 5]), client.optim_step(name))
        yield name


async def test_an_export_is_listed_and_holds_the_weights(model: str, client: Any, context: Any) -> None:
    result = await client.result(client.submit(model, Kind.SAVE_EXTERNAL, {"path": "out", "ttl_seconds": 3600}))
    answer = orjson.loads(result.result)
    row = client.journal.checkpoints.get(answer["path"], "local")
    assert answer == {
        "type": "save_weights_external",
        "path": f"tinker://{model}/external_weights/out",
        "size_bytes": row.size_bytes,
    }
    assert (row.kind, row.step, row.expires_at is not None) == ("external_weights", 1, True)
    data = context.store.read_range(context.store.find(row.path), "adapter_model.safetensors", 0, 10**6)
    weights = context.pool.executor.adapters[model].weights
    assert {name: array.tobytes() for name, array in load_safetensors(data).items()} == {
        name: array.tobytes() for name, array in weights.items()
    }

    for kind, body in ((Kind.LOAD_WEIGHTS, {"path": row.path}), (Kind.SAVE_EXTERNAL, {"path": "out"})):
        failed = await client.result(client.submit(model, kind, body))
        assert failed.category == "user" and "out" in failed.error


async def test_an_encrypted_export_needs_its_identity(model: str, client: Any, context: Any) -> None:
    identity = pyrage.x25519.Identity.generate()
    body = {"path": "secret", "age_encryption_recipients": [str(identity.to_public())]}
    result = await client.result(client.submit(model, Kind.SAVE_EXTERNAL, body))
    row = client.journal.checkpoints.get(orjson.loads(result.result)["path"], "local")
    sealed = context.store.read_range(context.store.find(row.path), "adapter_config.json.age", 0, 10**6)
    assert orjson.loads(pyrage.decrypt(sealed, [identity]))["base_model_name_or_path"] == context.card.name


async def test_name_of_a_deleted_checkpoint_is_free_before_its_files_are_deleted(
    model: str, client: Any, context: Any
) -> None:
    async def save() -> Any:
        return await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "a"}))

    path = orjson.loads((await save()).result)["path"]
    assert "exists already" in (await save()).error
    client.journal.checkpoints.delete(path, "local")
    assert (await save()).error is None
    delete_checkpoints(client.journal, context.store, Retention())
    assert context.store.find(path).attempt == client.journal.checkpoints.get(path, "local").attempt
    client.journal.checkpoints.set_ttl(path, "local", 0)
    assert (await save()).error is None  # the name of an expired checkpoint is free
    assert client.journal.checkpoints.get(path, "local").expires_at is None


async def test_undeletable_files_are_retried_and_do_not_block_others(
    model: str, client: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = []
    for name in ("a", "b"):
        saved = await client.result(client.submit(model, Kind.SAVE_FOR_SAMPLER, {"path": name}))
        paths.append(orjson.loads(saved.result)["path"])
        client.journal.checkpoints.delete(paths[-1], "local")
    delete, store = context.store.delete, context.store

    def failing(path: str, attempt: str) -> bool:
        if path == paths[0]:
            raise StoreError("the disk is on fire")
        return bool(delete(path, attempt))

    monkeypatch.setattr(store, "delete", failing)
    delete_checkpoints(client.journal, store, Retention())
    assert [path for path, _ in client.journal.upkeep.unpurged()] == [paths[0]]
    monkeypatch.undo()
    delete_checkpoints(client.journal, store, Retention())
    assert client.journal.upkeep.unpurged() == []
    assert store.checkpoints() == []


async def test_later_changes_of_a_checkpoint_are_written_into_its_commit(
    model: str, client: Any, context: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "a"}))
    path = orjson.loads(saved.result)["path"]
    assert context.store.find(path).meta.run_metadata == {"made": "here"}
    client.journal.checkpoints.publish(path, "local")
    client.journal.checkpoints.set_ttl(path, "local", 3600)
    amend, store = context.store.amend, context.store

    def failing(*args: Any, **more: Any) -> bool:
        raise StoreError("the line is down")

    monkeypatch.setattr(store, "amend", failing)
    write_changes(client.journal, store)
    assert not store.find(path).meta.public
    monkeypatch.setattr(store, "amend", amend)
    write_changes(client.journal, store)
    meta, row = store.find(path).meta, client.journal.checkpoints.get(path, "local")
    assert (meta.public, meta.expires_at) == (True, row.expires_at)
    assert client.journal.upkeep.unnoted() == []


async def test_retention_deletes_files_of_old_checkpoints(model: str, client: Any, context: Any) -> None:
    for name in ("a", "b", "c"):
        await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": name}))
    delete_checkpoints(client.journal, context.store, Retention())
    assert len(context.store.checkpoints()) == 3
    delete_checkpoints(client.journal, context.store, Retention(last=2))
    assert [saved.name for saved in context.store.checkpoints()] == ["b", "c"]
    assert client.journal.upkeep.unpurged() == []


async def test_access_token_lets_another_project_load(
    model: str, client: Any, connect: Any, context: Any, mirror: Mirror, running: Any
) -> None:
    saved = await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "a"}))
    path = orjson.loads(saved.result)["path"]
    _, token = client.journal.shares.create(path, "local")
    body = orjson.dumps({"path": path, "optimizer": False, "weights_access_token": token})
    kept = hash_token(body, access_hash)
    assert token.encode() not in kept
    state = await _load_as(kept, "stranger", context)
    np.testing.assert_array_equal(*(next(iter(s.weights.values())) for s in (state, context.store.load(path)[0])))
    for refused in (orjson.dumps({"path": path}), hash_token(body.replace(b"tfw-", b"tfw-x"), access_hash)):
        with pytest.raises(Exception, match="does not exist"):
            await _load_as(refused, "stranger", context)


async def test_a_state_of_another_shape_is_refused_before_it_is_read(model: str, client: Any) -> None:
    saved = await client.result(client.submit(model, Kind.SAVE_WEIGHTS, {"path": "a"}))
    row = client.journal.checkpoints.get(orjson.loads(saved.result)["path"], "local")
    shape = {"rank": 0, "train_attn": True, "train_mlp": True, "train_unembed": True}
    path = row.path.replace(model, f"{model}0")  # the store has no such checkpoint
    values = {field.name: getattr(row, field.name) for field in fields(CheckpointSaved)}
    every = CheckpointSaved(**values | shape | {"path": path, "run_id": f"{model}0"})
    client.journal.imports.record_import("whole", every)
    failed = await client.result(client.submit(model, Kind.LOAD_WEIGHTS, {"path": path, "optimizer": False}))
    assert failed.category == "user"
    rank = client.journal.models.get(model, None).rank
    assert failed.error == (
        f"path {path!r} has rank 0: must be {rank}, as in model {model}; create a model from the checkpoint instead"
    )


async def _load_as(payload: bytes, owner: str, context: Any) -> Any:
    from tinkerflow.backend.wire import LoadWeights
    from tinkerflow.tasks.operations.load_weights import check_readable, read_checkpoint

    wanted = LoadWeights.decode(payload)
    await check_readable(context, owner, wanted.path, wanted.access)
    state, _ = await read_checkpoint(context, wanted.path, optimizer=wanted.optimizer)
    return state
