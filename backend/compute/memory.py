"""How much of the devices' memory training may take: micro-batches as large as help, and what is kept of them."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.lora import ATTENTION, MLP
from tinkerflow.backend.compute.mesh import FSDP, on_cpu

_LEAST_TOKENS = 1024  # of a device of the fsdp axis: fewer leave it idle
_MOST_TOKENS = 4096  # more make whoever samples wait
_KEPT_ON_CPUS = 2**30  # bytes: writing out more costs more than computing it again
_KEPT = 0.3  # of what the base model leaves free; the sampler has its own part, and adapters want theirs
_RANK = 32  # of the adapters that a micro-batch is sized for


@dataclass(frozen=True)
class Budget:
    """microbatch_tokens: padded tokens that are trained on at once. kept_bytes: what a device may keep of them for a
    backward pass; where layers would keep more, each is computed again.
    """

    microbatch_tokens: int
    kept_bytes: int


def training_budget(cfg: ModelConfig, mesh: Mesh, params: Any, microbatch_tokens: int = 0) -> Budget:
    """Of a model with these weights on the devices. Called on every process, all agree. microbatch_tokens: 0 = choose.

    It follows from sizes alone, not from what is free at the moment: what is replayed after a crash must be computed
    in the same micro-batches.
    """
    if on_cpu():
        return Budget(microbatch_tokens or _LEAST_TOKENS, _KEPT_ON_CPUS)
    kept = least(int(_KEPT * max(0, device_bytes() - held_bytes(params))))
    ranks, tokens = _RANK * (len(ATTENTION) + len(MLP) * (cfg.experts_per_token or 1)), _LEAST_TOKENS
    while tokens < _MOST_TOKENS and kept_bytes(cfg, ranks, 2 * tokens, params.embed_VD.dtype) <= kept:
        tokens *= 2
    return Budget(microbatch_tokens or tokens * mesh.shape[FSDP], kept)


def kept_bytes(cfg: ModelConfig, ranks: int, tokens: int, dtype: Any) -> int:
    """What the layers keep of `tokens` tokens for a backward pass: their inputs and `transformer.KEPT`.

    ranks: of a layer's pairs, those of its MLP once for each expert that a token goes to.
    """
    queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    width = 2 * cfg.hidden + 2 * (queries + keys) + 2 * (cfg.experts_per_token or 1) * cfg.mlp + ranks
    return int(cfg.layers * tokens * (width * jnp.dtype(dtype).itemsize + 4 * cfg.heads))


def device_bytes() -> int:
    """Memory of one device of this process; CPU devices share the machine's."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()


def held_bytes(arrays: Any) -> int:
    """What a device holds of a pytree of arrays."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def least(value: int) -> int:
    """The least that any process says."""
    if jax.process_count() == 1:
        return value
    # In two words: JAX makes 32 bits of 64.
    said = multihost_utils.process_allgather(np.array(divmod(value, 2**31), np.int32))
    return min(int(high) * 2**31 + int(low) for high, low in said)
