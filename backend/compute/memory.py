"""How much device memory training may take: the size of a micro-batch, and what is kept for its backward pass."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.families import projections
from tinkerflow.backend.compute.mesh import FSDP
from tinkerflow.backend.compute.platforms import on_cpu
from tinkerflow.backend.compute.transformer import KEPT, Params

_LEAST_TOKENS = 1024  # per device of the fsdp axis: fewer leave it idle
_MOST_TOKENS = 4096  # more make sample requests wait
_KEPT_ON_CPUS = 2**30  # bytes: writing out more costs more than computing it again
_KEPT = 0.3  # of what the base model leaves free; the sampler and the adapters take the rest
_RANK = 32  # of the adapters that a micro-batch is sized for

Words = npt.NDArray[np.int32]
Gather = Callable[[Words], Words]  # from the array of this process to those of all, [processes, ...]


@dataclass(frozen=True)
class Budget:
    """microbatch_tokens: padded tokens that are trained on together.

    kept_bytes: what a device may keep of them for a backward pass. Where the layers would keep more, each layer is
    computed again instead.
    """

    microbatch_tokens: int
    kept_bytes: int


def training_budget(cfg: ModelConfig, mesh: Mesh, params: Params, microbatch_tokens: int = 0) -> Budget:
    """The budget of a model with these weights on the devices. Every process must call it; all get the same.

    microbatch_tokens: the size to use, 0 = choose.
    """
    free = None if on_cpu() else least(max(0, device_bytes() - held_bytes(params)))
    return budget_for(cfg, params.embed_VD.dtype, mesh.shape[FSDP], free, microbatch_tokens)


def budget_for(cfg: ModelConfig, dtype: Any, fsdp: int, free_bytes: int | None, microbatch_tokens: int = 0) -> Budget:
    """The budget on devices of this size.

    It depends on sizes alone, not on what is free at the moment: commands that are replayed after a crash must be
    computed in the same micro-batches.

    cfg: the model. dtype: of its activations. fsdp: devices that rows are split over. free_bytes: what the weights
    leave of each device's memory; None on CPUs, where the budget does not depend on the machine. microbatch_tokens: the
    size to use, 0 = choose.
    """
    if free_bytes is None:
        return Budget(microbatch_tokens or _LEAST_TOKENS, _KEPT_ON_CPUS)
    kept, tokens = int(_KEPT * free_bytes), _LEAST_TOKENS
    ranks = _RANK * sum(matrix.per_token for name, matrix in projections(cfg).items() if name != "unembed")
    while tokens < _MOST_TOKENS and kept_bytes(cfg, ranks, 2 * tokens, dtype) <= kept:
        tokens *= 2
    return Budget(microbatch_tokens or tokens * fsdp, kept)


def kept_bytes(cfg: ModelConfig, ranks: int, tokens: int, dtype: Any) -> int:
    """What all layers keep of `tokens` tokens for a backward pass: their inputs and `transformer.KEPT`, in bytes.

    ranks: the sum over the matrices that a token goes through in one layer. dtype: of the activations.
    """
    matrices = projections(cfg)
    results = sum(matrices[name].outputs * matrices[name].per_token for name in KEPT if name in matrices)
    width = cfg.hidden + cfg.heads * cfg.head_dim + results + ranks  # a layer's input, `attended`, results, `low`
    return int(cfg.layers * tokens * (width * jnp.dtype(dtype).itemsize + 4 * cfg.heads))  # and `log_totals`, float32


def device_bytes() -> int:
    """Memory of one device of this process; CPU devices share the machine's."""
    stats = jax.local_devices()[0].memory_stats()
    if stats and "bytes_limit" in stats:
        return int(stats["bytes_limit"])
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // jax.device_count()


def held_bytes(arrays: Any) -> int:
    """Bytes that a pytree of arrays takes on one device."""
    leaves = jax.tree.leaves(arrays)
    return sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in leaves)


def least(value: int, gather: Gather | None = None) -> int:
    """The smallest value that any process calls it with. gather: None = over all processes of the group."""
    if gather is None:
        if jax.process_count() == 1:
            return value
        gather = multihost_utils.process_allgather
    words = gather(np.array(divmod(value, 2**31), np.int32))  # two, because JAX makes 32 bits of 64
    return min(int(high) * 2**31 + int(low) for high, low in words)
