"""Stores of all kinds, and adapter states to save."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import fsspec
import numpy as np
import pytest
from tests.manual_clock import ManualClock
from tests.store.fake_gcs import FakeGcs

from tinkerflow.backend.spec.commands import AdapterState, LoraSpec
from tinkerflow.backend.store import CheckpointMeta, Store


@pytest.fixture(scope="package")
def gcs() -> Iterator[FakeGcs]:
    """The fake of Google Cloud Storage. gs:// uses it while this fixture is active."""
    with FakeGcs() as fake, pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", fake.url)
        yield fake


@pytest.fixture(params=["file", "memory", "gs"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    if request.param == "gs":
        request.getfixturevalue("gcs")
        yield f"gs://bucket/{uuid.uuid4().hex}"
        return
    if request.param == "file":
        yield f"file://{tmp_path / 'store'}"
        return
    root = f"memory://{uuid.uuid4().hex}"
    yield root
    filesystem = fsspec.filesystem("memory")
    if filesystem.exists(root):
        filesystem.rm(root, recursive=True)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def store(url: str, clock: ManualClock) -> Store:
    return Store.open(url, clock=clock)


@pytest.fixture
def make_state() -> Callable[..., AdapterState]:
    """A small adapter state, with moments by default. `fill` distinguishes states."""

    def make(fill: float = 1.0, *, optimizer: bool = True) -> AdapterState:
        rng = np.random.default_rng(int(fill * 1000))
        base = "base_model.model.model.layers.0.self_attn.q_proj"
        weights = {
            f"{base}.lora_A.weight": rng.standard_normal((4, 8), dtype=np.float32),
            f"{base}.lora_B.weight": rng.standard_normal((6, 4), dtype=np.float32),
        }
        moments = {name + end: array * 2 for name, array in weights.items() for end in (".mu", ".nu")}
        spec = LoraSpec(rank=4, train_mlp=False, train_unembed=False)
        return AdapterState(spec=spec, step=int(fill), weights=weights, moments=moments if optimizer else {})

    return make


@pytest.fixture
def meta() -> CheckpointMeta:
    return CheckpointMeta(base_model="tiny", owner="local", user_metadata={"note": "first"})


@pytest.fixture
def same() -> Callable[[AdapterState, AdapterState], None]:
    """Assert that two states are equal, bit for bit."""

    def check(left: AdapterState, right: AdapterState) -> None:
        assert (left.spec, left.step) == (right.spec, right.step)
        for ours, theirs in ((left.weights, right.weights), (left.moments, right.moments)):
            assert ours.keys() == theirs.keys()
            for name, array in ours.items():
                assert theirs[name].dtype == np.float32
                assert array.shape == theirs[name].shape
                assert array.tobytes() == theirs[name].tobytes()

    return check
