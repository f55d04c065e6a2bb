"""The bytes that arrays take on each device, computed from their shapes and shardings, without a device.

Letters: V vocabulary, D hidden.
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import jax
from jax.sharding import AbstractMesh

from tinkerflow.backend.compute.mesh import EXPERT, FSDP, TENSOR
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.layers import GatedDeltaNet
from tinkerflow.backend.compute.models.params import params_like
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.spec.commands import GroupConfig
from tinkerflow.backend.spec.formats import BaseWeights, Dtype


def weight_bytes(cfg: ModelConfig, config: GroupConfig) -> int:
    """The bytes that the base model takes on each device."""
    return _weight_bytes(cfg, abstract_mesh(config), config.dtype, config.base_weights)


@lru_cache(maxsize=256)  # a plan asks for the same sizes hundreds of times
def _weight_bytes(cfg: ModelConfig, mesh: Any, dtype: Dtype, base_weights: BaseWeights) -> int:
    return held_bytes(params_like(cfg, mesh, dtype, base_weights=base_weights))


def step_weights(cfg: ModelConfig, config: GroupConfig, tokens: int) -> float:
    """The bytes of the base model that a step for `tokens` tokens reads on each device."""
    return read_bytes(params_like(cfg, abstract_mesh(config), config.dtype, base_weights=config.base_weights), tokens)


def read_bytes(params: Params, tokens: int) -> float:
    """The bytes of the base weights that a step for `tokens` tokens reads on each device.

    params: the arrays, or shapes with shardings. A step reads only some rows of an embedding table, unless the table is
    also the unembedding.
    """
    tables = [] if params.unembed_VD is None else [params.embed_VD]
    tables += [] if params.inputs is None else [params.inputs["embed"]]
    return held_bytes(params) - sum(held_bytes(table) * max(0, 1 - tokens / table.shape[0]) for table in tables)


def held_bytes(arrays: Any) -> int:
    """The bytes that a pytree of arrays takes on one device."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def abstract_mesh(config: GroupConfig) -> Any:
    """The group's mesh without devices."""
    return AbstractMesh((config.fsdp, config.expert, config.tensor), (FSDP, EXPERT, TENSOR))


def row_devices(config: GroupConfig) -> int:
    """The number of devices that rows of training are split over (`mesh.ROWS`)."""
    return config.fsdp * config.expert


def share(size: int, parts: int) -> int:
    """The part of a dimension that a device holds: all of it if `parts` does not divide it."""
    return size // parts if size % parts == 0 else size


def state_heads(delta: GatedDeltaNet, config: GroupConfig) -> int:
    """The number of value heads whose states a device holds. They are split like the key heads."""
    return share(delta.key_heads, config.tensor) * (delta.value_heads // delta.key_heads)
