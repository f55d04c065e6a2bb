"""The states of layers with linear attention on the devices, one per sequence, in a pool like the pool of pages.

A dispatch gathers the states of its rows from the pool, carries them through its layers and tokens, and scatters them
back. In decode on GPUs and TPUs, the matrices stay in the pool (`delta_rule.Pooled`), where kernels update them.

Letters: L layers with states, N states of all shards, S rows, and the letters of `delta_rule`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tinkerflow.backend.compute.mesh import FSDP, TENSOR, cache_mesh
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.layers import DELTA
from tinkerflow.backend.compute.models.layers.delta_rule import DeltaState, Pooled, empty_state

# States of gathered rows: [L, S, ...], or by layer L of [S, ...]. None in models without states.
States = DeltaState | tuple[DeltaState, ...] | None


def empty_pool(cfg: ModelConfig, mesh: Mesh, states: int, dtype: str) -> DeltaState | None:
    """A pool of zeros; None for a model without such layers. states: N, a multiple of the fsdp axis."""
    if cfg.delta is None or not states:
        return None
    number, one = len(cfg.numbers(DELTA)), empty_state(cfg.delta, states, dtype)
    pool: DeltaState = jax.tree.map(lambda part: jnp.zeros((number, *part.shape), part.dtype), one)
    return pin_pool(cfg, mesh, pool)


def pool_sharding(cfg: ModelConfig, mesh: Mesh) -> DeltaState:
    """A sharding for each array: states over fsdp, and heads over tensor if this axis divides the key heads."""
    assert cfg.delta is not None
    mesh = cache_mesh(mesh, cfg.split_heads)
    heads = TENSOR if cfg.delta.key_heads % mesh.shape[TENSOR] == 0 else None
    conv, S = PartitionSpec(None, FSDP), PartitionSpec(None, FSDP, heads)
    return DeltaState(*(NamedSharding(mesh, spec) for spec in (conv, S)))  # type: ignore[arg-type]


def pin_pool(cfg: ModelConfig, mesh: Mesh, pool: DeltaState | None) -> DeltaState | None:
    """The pool, pinned to the sharding that the next step expects."""
    if pool is None:
        return None
    pinned: DeltaState = jax.lax.with_sharding_constraint(pool, pool_sharding(cfg, mesh))
    return pinned


def gather_states(
    cfg: ModelConfig,
    mesh: Mesh,
    pool: DeltaState | None,
    states_S: Any,
    fresh_S: jax.Array,
    *,
    by_layer: bool,
    pooled: bool = False,
) -> States:
    """The states of the rows; zeros where `fresh_S`, for a row without tokens yet.

    cfg, mesh: the base model's shape, and the devices. pool: None in models without states. states_S int32: the states'
    numbers in the row's own shard; 0: none. fresh_S: bool. by_layer: whether to return an array for each layer. pooled:
    the matrices stay in the pool; then not by layer.
    """
    if pool is None:
        return None

    def local(part: jax.Array, states_S: jax.Array, fresh_S: jax.Array) -> jax.Array:
        taken = part.at[:, states_S].get(mode="promise_in_bounds")
        return jnp.where(fresh_S.reshape(1, -1, *(1,) * (taken.ndim - 2)), 0, taken)

    def one(part: jax.Array, where: NamedSharding) -> jax.Array:
        rows = PartitionSpec(FSDP)
        return jax.shard_map(
            local, mesh=where.mesh, in_specs=(where.spec, rows, rows), out_specs=where.spec, check_vma=False
        )(part, states_S, fresh_S)

    where: Any = pool_sharding(cfg, mesh)
    if pooled:
        assert isinstance(pool.S, jax.Array)
        matrices = Pooled(pool.S, jnp.int32(0), jnp.asarray(states_S), fresh_S)
        return DeltaState(one(pool.conv, where.conv), matrices)
    rows: DeltaState = jax.tree.map(one, pool, where)
    if not by_layer:
        return rows
    return tuple(jax.tree.map(lambda part, layer=layer: part[layer], rows) for layer in range(len(rows.conv)))


def scatter_states(
    cfg: ModelConfig, mesh: Mesh, pool: DeltaState | None, rows: States, states_S: Any
) -> DeltaState | None:
    """The pool, updated in place, with the rows' states. Rows without a state in the pool are dropped.

    cfg, mesh: the model and its devices. pool: None in models without states. rows: from `gather_states`. states_S
    int32: the place of each row's state in the pool; 0: none.
    """
    if pool is None or rows is None:
        return None

    def local(part: jax.Array, own: jax.Array, states_S: jax.Array) -> jax.Array:
        outside_S = part.shape[1] + jnp.arange(len(states_S), dtype=jnp.int32)
        # Declared unique, because a GPU would otherwise sort all numbers of all states to add them up in a fixed order.
        places_S = jnp.where(states_S == 0, outside_S, states_S)
        return part.at[:, places_S].set(own, mode="drop", unique_indices=True)

    def one(part: jax.Array, own: jax.Array, where: NamedSharding) -> jax.Array:
        return jax.shard_map(
            local,
            mesh=where.mesh,
            in_specs=(where.spec, where.spec, PartitionSpec(FSDP)),
            out_specs=where.spec,
            check_vma=False,
        )(part, own, states_S)

    where: Any = pool_sharding(cfg, mesh)
    if isinstance(rows, tuple):
        rows = jax.tree.map(lambda *parts: jnp.stack(parts), *rows)
    elif isinstance(rows.S, Pooled):
        return pin_pool(cfg, mesh, DeltaState(one(pool.conv, rows.conv, where.conv), rows.S.S))
    changed: DeltaState = jax.tree.map(one, pool, rows, where)
    return pin_pool(cfg, mesh, changed)


def state_of(rows: DeltaState | tuple[DeltaState, ...], place: Any, fresh_S: jax.Array) -> DeltaState:
    """The rows' states in a layer. place: its number among layers with states; an int if the rows are by layer.

    fresh_S: bool, whether a row has no tokens yet.
    """
    if isinstance(rows, tuple):
        return rows[place]

    def own(part: jax.Array) -> jax.Array:
        return jax.lax.dynamic_index_in_dim(part, place, keepdims=False)

    if isinstance(rows.S, Pooled):
        return DeltaState(own(rows.conv), replace(rows.S, layer=place, fresh_B=fresh_S))
    states: DeltaState = jax.tree.map(own, rows)
    return states


def with_layer(rows: DeltaState | tuple[DeltaState, ...], place: Any, state: DeltaState) -> States:
    """The rows with new states in a layer. place: as in `state_of`."""
    if isinstance(rows, tuple):
        return (*rows[:place], state, *rows[place + 1 :])

    def changed(part: jax.Array, new: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(part, new, place, 0)

    if isinstance(rows.S, Pooled) and isinstance(state.S, Pooled):
        return DeltaState(changed(rows.conv, state.conv), replace(rows.S, S=state.S.S))
    whole: DeltaState = jax.tree.map(changed, rows, state)
    return whole
