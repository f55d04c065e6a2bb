"""Shards of any size restore an adapter bit for bit. Errors name the shards that are missing or do not fit."""

from __future__ import annotations

import numpy as np
import pytest
from tests.compute.conftest import examples, forward

from tinkerflow.backend.core.errors import ServerError, UserError
from tinkerflow.backend.spec.checkpoint import Digest
from tinkerflow.backend.spec.commands import (
    AdapterKept,
    AdapterState,
    CreateAdapter,
    DropSnapshot,
    ExportAdapter,
    FetchState,
    ImportAdapter,
    LoadSnapshot,
    LoraSpec,
    OptimStep,
    StoredState,
    WriteState,
)
from tinkerflow.backend.spec.optimizers.adamw import AdamParams

SPEC = LoraSpec(4)
FILES = {"part-00000.safetensors": Digest.of(b"")}
STORED = StoredState(SPEC, 1, "adamw", "runs/r/recovery/n/a", FILES)


@pytest.fixture
def pieces(executor) -> dict[str, np.ndarray]:
    """The pieces of an adapter after one step, with accumulated gradients for the next one."""
    executor.execute(CreateAdapter("source", SPEC, 3))
    for _ in range(2):
        forward(executor, "source", examples((9,)), backward=True)
        if not executor._adapters.get("source").step:
            executor.execute(OptimStep("source", AdamParams(learning_rate=0.1)))
    kept = executor.execute(ExportAdapter("source", optimizer=True, keep="folder"))
    assert kept == AdapterKept(SPEC, 1, "adamw")
    return dict(executor.take_kept(WriteState("source", "folder")))


def same(one: AdapterState, other: AdapterState) -> bool:
    tensors, others = (one.weights | one.moments), (other.weights | other.moments)
    return tensors.keys() == others.keys() and all((array == others[name]).all() for name, array in tensors.items())


def fetched(executor, pieces) -> AdapterState:
    executor.keep_fetched(FetchState("again", STORED), pieces)
    executor.execute(ImportAdapter("again", STORED))
    return executor.execute(ExportAdapter("again", optimizer=True))


def test_read_pieces_form_the_adapter_again(executor, pieces):
    assert {name.partition("/")[0] for name in pieces} == {"weights", "mu", "nu", "grad"}
    assert sorted(executor.needed_tensors(STORED, {name: a.shape for name, a in pieces.items()})) == sorted(pieces)
    before = executor.execute(ExportAdapter("source", optimizer=True))
    after = fetched(executor, pieces)
    assert same(before, after)
    assert (after.step, after.optimizer) == (1, "adamw")
    with pytest.raises(ServerError, match="was not fetched"):
        executor.execute(ImportAdapter("again", STORED))


def test_adapter_survives_another_mesh_and_the_driver(executor, pieces):
    halves = {}
    for name, array in pieces.items():
        middle, (array_name, _, starts) = array.shape[-1] // 2, name.partition("@")
        halves[name] = array[..., :middle]
        halves[f"{array_name}@{','.join([*starts.split(',')[:-1], str(middle)])}"] = array[..., middle:]
    executor.execute(ImportAdapter("again", AdapterState(SPEC, 1, halves)))
    again = executor.execute(ExportAdapter("again", optimizer=True))
    assert same(again, executor.execute(ExportAdapter("source", optimizer=True)))


def test_missing_or_foreign_piece_is_named(executor, pieces):
    name = "weights/q.A@0,0,0"
    without = {piece: array for piece, array in pieces.items() if piece != name}
    with pytest.raises(UserError, match=r"saved tensor 'weights/q\.A' of shape .* is missing or cut"):
        fetched(executor, without)
    for wrong in ("weights/other.A@0,0,0", "other/q.A@0,0,0", "weights/q.A@x"):
        with pytest.raises(UserError, match=f"saved tensor '{wrong}'"):
            fetched(executor, pieces | {wrong: pieces[name]})


def test_fetched_state_survives_dropping_an_earlier_snapshot(executor, pieces):
    before = executor.execute(ExportAdapter("source", optimizer=False))
    executor.keep_fetched(FetchState("sampled", STORED), before.weights)
    executor.keep_fetched(FetchState("sampled", STORED.copy_with(folder="late")), {})
    executor.execute(DropSnapshot("sampled"))  # sent before the fetch, and executed after it
    executor.execute(LoadSnapshot("sampled", STORED))
    with pytest.raises(ServerError, match="in late was not fetched"):
        executor.execute(LoadSnapshot("sampled", STORED.copy_with(folder="late")))
    executor.execute(DropSnapshot("sampled"))


def test_kept_copy_is_taken_once_and_for_its_own_folder_only(executor, pieces):
    with pytest.raises(ServerError, match="no copy"):
        executor.take_kept(WriteState("source", "folder"))
    executor.execute(ExportAdapter("source", optimizer=True, keep="older"))
    executor.execute(ExportAdapter("source", optimizer=True, keep="newer"))
    with pytest.raises(ServerError, match="no copy for older"):
        executor.take_kept(WriteState("source", "older"))
    assert executor.take_kept(WriteState("source", "newer")).keys() == pieces.keys()
