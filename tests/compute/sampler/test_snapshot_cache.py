"""Snapshots are copies. The stack holds adapters of different ranks, and each row uses only its own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from tests.compute.closeness import close
from tests.compute.conftest import ask, run_all
from tests.compute.sampler.conftest import prompt, random_lora

from tinkerflow.backend.compute.models.lora import Lora, LoraPair, apply_one
from tinkerflow.backend.compute.sampler.snapshot_cache import SnapshotCache, placed, stack_apply
from tinkerflow.backend.core.errors import ConflictError, NotFoundError, UserError
from tinkerflow.backend.spec.commands import LoraSpec


@pytest.fixture(params=[True, False], ids=["by layer", "stacked"])
def snapshots(qwen: Any, request: pytest.FixtureRequest) -> SnapshotCache:
    return SnapshotCache(qwen.cfg, qwen.mesh, "float32", by_layer=request.param)


def test_each_row_uses_its_adapter(qwen: Any, snapshots: SnapshotCache) -> None:
    specs = {
        "a": LoraSpec(3),
        "b": LoraSpec(12, train_mlp=False),
        "c": LoraSpec(8, train_attn=False, train_unembed=False),
    }
    loras = {name: random_lora(qwen.cfg, spec, seed) for seed, (name, spec) in enumerate(specs.items())}
    for name, spec in specs.items():
        snapshots.publish(name, loras[name], spec)
    snapshots.use([snapshots.find(name) for name in specs])
    assert snapshots.width == 32  # 8 + 16 + 8
    order = [None, "b", "a", "c", "a"]
    columns = [snapshots.columns(name and snapshots.find(name)) for name in order]
    columns_B2 = np.asarray([[c.start, c.end] for c in columns], np.int32)
    x = np.random.default_rng(0).normal(size=(len(order), 2, qwen.cfg.hidden)).astype(np.float32)
    for projection in ("q", "gate"):
        pair = snapshots.lora.layers[projection]
        layer = LoraPair(A=pair.A[1], B=pair.B[1])
        (got,) = jax.jit(lambda x, c, p: stack_apply(c)(x, (p,)))(x, columns_B2, layer)
        for row, name in enumerate(order):
            own = loras[name].layers.get(projection) if name else None
            expected = 0.0 if own is None else apply_one(x[row], (LoraPair(A=own.A[1], B=own.B[1]),))[0]
            close(got[row], np.broadcast_to(expected, got[row].shape), ulps=64, scale=1.0)


def test_base_model_alone_needs_no_adapter_stack(qwen: Any) -> None:
    snapshots = SnapshotCache(qwen.cfg, qwen.mesh, "float32", by_layer=True, plain=True)
    snapshots.use([])
    assert (snapshots.width, snapshots.lora) == (0, Lora(layers={}, unembed=None))
    snapshots.publish("a", random_lora(qwen.cfg, LoraSpec(3), 0), LoraSpec(3))
    snapshots.use([snapshots.find("a")])
    assert snapshots.width == 32
    snapshots.use([])
    assert snapshots.width == 32, "a snapshot that returns finds it"
    snapshots.reset_stack()
    assert snapshots.width == 0


def test_a_snapshot_is_a_copy(qwen: Any, snapshots: SnapshotCache) -> None:
    spec = LoraSpec(8)
    lora = jax.device_put(random_lora(qwen.cfg, spec, 0))
    snapshots.publish("a", lora, spec)
    before = np.array(snapshots.find("a").lora.layers["q"].A)
    zeroed = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf * 0, tree), donate_argnums=0)(lora)
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(lora)), "training would have donated these buffers"
    del zeroed
    np.testing.assert_array_equal(snapshots.find("a").lora.layers["q"].A, before)


def test_least_recently_used_snapshots_move_to_the_host(qwen: Any) -> None:
    snapshots = SnapshotCache(qwen.cfg, qwen.mesh, "float32", by_layer=True, most_resident=2)
    specs = {"a": LoraSpec(8), "b": LoraSpec(16), "c": LoraSpec(8), "d": LoraSpec(8)}
    wanted = {}
    for name, spec in specs.items():
        snapshots.publish(name, random_lora(qwen.cfg, spec, 0), spec)
        wanted[name] = [np.array(leaf) for leaf in jax.tree.leaves(snapshots.find(name).lora)]

    def resident() -> str:
        kinds = {name: {type(leaf) for leaf in jax.tree.leaves(snapshots.find(name).lora)} for name in sorted(specs)}
        assert all(len(kind) == 1 for kind in kinds.values())
        return "".join(name for name, kind in kinds.items() if np.ndarray not in kind)

    assert resident() == "cd"
    snapshots.use([snapshots.find("a")])
    assert resident() == "ad"
    compiled = placed._cache_size()
    snapshots.use([snapshots.find("d")])
    snapshots.use([snapshots.find("c")])  # a snapshot that was on the host, like "a"
    assert resident() == "cd"
    snapshots.use(
        [snapshots.find("a"), snapshots.find("c"), snapshots.find("d")]
    )  # more than the limit of residents, all in the stack
    assert placed._cache_size() == compiled, "the same program for snapshots on the host and on devices"
    for name, leaves in wanted.items():
        held = jax.tree.leaves(snapshots.find(name).lora)
        assert all((np.array(one) == other).all() for one, other in zip(held, leaves, strict=True))
        assert snapshots.find(name).nbytes == sum(leaf.nbytes for leaf in leaves)
    dropped = snapshots.find("b")
    snapshots.drop("b")
    snapshots.use([dropped])  # a request still samples it
    assert len(snapshots.resident) == 2
    assert snapshots.columns(dropped).end > 0


def test_adapter_stack_counts_against_the_snapshot_bytes(qwen: Any) -> None:
    snapshots = SnapshotCache(qwen.cfg, qwen.mesh, "float32", by_layer=True, most_resident=9, most_bytes=10**9)
    for name in "abc":
        snapshots.publish(name, random_lora(qwen.cfg, LoraSpec(32), 0), LoraSpec(32))
    one = snapshots.find("a").nbytes
    snapshots.use([snapshots.find("c")])
    assert snapshots.resident == ["a", "b", "c"]
    snapshots._most_bytes = 3 * one  # two, and a stack as large as one
    snapshots.use([snapshots.find("c")])
    assert snapshots.resident == ["b", "c"]


def test_samples_are_the_same_wherever_their_snapshots_were(qwen: Any) -> None:
    def results(most_resident: int | None) -> list[Any]:
        sampler, spec = qwen.sampler(decode_chunk=8), LoraSpec(8)
        sampler.snapshots.most_resident = most_resident
        for seed, name in enumerate("abcd"):
            sampler.publish(name, random_lora(qwen.cfg, spec, seed), spec)
        found = []
        for names in ("ab", "cd", "a", "abcd", "dc"):
            asked = [ask(f"{names} {name}", prompt(20), 12, snapshot_id=name) for name in names]
            found += [(name, run_all(sampler, one)) for name, one in zip(names, asked, strict=True)]
            found += [run_all(sampler, *(replace(one, request_id=f"all {one.request_id}") for one in asked))]
        sampler.rename_snapshot("a", "b")  # a snapshot on the host is renamed over another
        sampler.drop_snapshot("c")
        found += [run_all(sampler, *(ask(name, prompt(20), 12, snapshot_id=name) for name in "bd"))]
        sampler.publish("e", random_lora(qwen.cfg, spec, 5), spec)
        assert sampler.snapshots.resident == (["b", "d", "e"] if most_resident is None else ["e"])
        return found

    assert repr(results(1)) == repr(results(None))


def test_published_snapshot_id_cannot_be_published_again(qwen: Any, snapshots: SnapshotCache) -> None:
    spec = LoraSpec(8)
    snapshots.publish("a", random_lora(qwen.cfg, spec, 0), spec)
    with pytest.raises(ConflictError, match="'a' exists already"):
        snapshots.publish("a", random_lora(qwen.cfg, spec, 1), spec)
    snapshots.drop("a")
    snapshots.drop("a")
    with pytest.raises(NotFoundError, match="'a'"):
        snapshots.find("a")


def test_non_finite_weights_are_refused(qwen: Any, snapshots: SnapshotCache) -> None:
    spec = LoraSpec(8)
    lora = random_lora(qwen.cfg, spec, 0)
    lora.layers["up"].B[1, 2, 3] = np.inf
    with pytest.raises(UserError, match=r"'a'.*not finite"):
        snapshots.publish("a", lora, spec)


def test_columns_are_reused_and_cleaned(qwen: Any, snapshots: SnapshotCache) -> None:
    full, part = LoraSpec(20), LoraSpec(20, train_attn=False)
    for name, spec in (("a", full), ("b", part), ("c", full)):
        snapshots.publish(name, random_lora(qwen.cfg, spec, 0), spec)
    a, b, c = (snapshots.find(name) for name in "abc")
    snapshots.use([a])
    snapshots.use([b])  # a is no longer used: b gets its columns, and the attention part of a must be gone
    assert snapshots.width == 32
    assert not np.any(snapshots.lora.layers["q"].A) and np.any(snapshots.lora.layers["up"].A)
    snapshots.use([b, c])
    assert snapshots.width == 128
    kept = snapshots.columns(b)
    snapshots.drop("b")
    snapshots.use([b, c, a])
    assert snapshots.width == 128 and snapshots.columns(b) == kept
    snapshots.reset_stack()
    assert snapshots.width == 0 and not snapshots.lora.layers


def test_snapshot_id_may_move_to_another_snapshot(qwen: Any, snapshots: SnapshotCache) -> None:
    spec = LoraSpec(8)
    for seed, name in enumerate(("old", "new")):
        snapshots.publish(name, random_lora(qwen.cfg, spec, seed), spec)
    old, new = snapshots.find("old"), snapshots.find("new")
    moved = snapshots.rename("new", "old")
    assert "new" not in snapshots and snapshots.find("old") is moved and moved.lora is new.lora
    snapshots.use([old, moved])
    assert snapshots.columns(old) != snapshots.columns(moved), "the old snapshot still works for its requests"
    with pytest.raises(NotFoundError, match="'new'"):
        snapshots.rename("new", "old")
