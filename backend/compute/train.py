"""The compiled steps of training: forward, forward and backward into donated gradients, optimizer step.

Frozen weights are arguments, never closed over, because a jitted function cannot close over an array that spans
processes. Output shardings are pinned: a first call and a restored state must be the same executable.
Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from backend.compute.attention import attend_segments
from backend.compute.config import ModelConfig
from backend.compute.logprobs import Scored, score, score_and_grads
from backend.compute.lora import Lora, apply_one
from backend.compute.losses import LossChoice, LossInputs
from backend.compute.mesh import FSDP, TENSOR, put, replicated, sharding
from backend.compute.optimizer import Moments, Stepped, adamw_step
from backend.compute.packing import MicroBatch
from backend.compute.transformer import Params, forward, unembed_matrix

_KEPT_BYTES = 2**30  # activations that a device may keep for a backward pass; above, layers are computed again


@flax.struct.dataclass
class Batch:
    """A micro-batch on the devices, rows split over fsdp, and the loss to compute of it."""

    tokens_BT: Any
    positions_BT: Any
    segments_BT: Any
    targets_BTK: Any
    inputs: LossInputs
    choice: LossChoice


@dataclass(frozen=True)
class Steps:
    """The jitted functions. Each compiles once for every shape of batch and adapter, and for nothing else.

    forward(params, lora, batch) -> Scored
    backward(params, lora, grads, batch) -> (grads, Scored): the loss's gradient is added; `grads` is donated
    optimize(lora, grads, moments, hyper) -> Stepped: all but `hyper` is donated
    """

    forward: Callable[[Params, Lora, Batch], Scored]
    backward: Callable[[Params, Lora, Lora, Batch], tuple[Lora, Scored]]
    optimize: Callable[[Lora, Lora, Moments, Any], Stepped]


def make_steps(cfg: ModelConfig, mesh: Mesh) -> Steps:
    """The steps of a model on a mesh. Adapters and all outputs are replicated."""

    def constrain(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding(mesh, x.shape, FSDP))

    def hidden(params: Params, lora: Lora, batch: Batch, *, remat: bool) -> jax.Array:
        attend = attend_segments(batch.segments_BT)
        tokens, positions = batch.tokens_BT, batch.positions_BT
        return forward(cfg, params, lora, tokens, positions, attend, apply_one, constrain=constrain, remat=remat)

    def unembed(params: Params) -> jax.Array:
        # Gathered over fsdp once, not again for every chunk of logits.
        matrix_DV = unembed_matrix(params)
        return jax.lax.with_sharding_constraint(matrix_DV, sharding(mesh, matrix_DV.shape, None, TENSOR))

    def forward_step(params: Params, lora: Lora, batch: Batch) -> Scored:
        hidden_BTD = hidden(params, lora, batch, remat=False)
        return score(hidden_BTD, unembed(params), lora.unembed, batch.targets_BTK, batch.choice, batch.inputs)

    def backward_step(params: Params, lora: Lora, grads: Lora, batch: Batch) -> tuple[Lora, Scored]:
        remat = _kept_bytes(cfg, batch.tokens_BT.size // mesh.shape[FSDP], params.embed_VD.dtype) > _KEPT_BYTES
        hidden_BTD, pull = jax.vjp(lambda lora: hidden(params, lora, batch, remat=remat), lora)
        scored, d_hidden_BTD, d_unembed = score_and_grads(
            hidden_BTD, unembed(params), lora.unembed, batch.targets_BTK, batch.choice, batch.inputs
        )
        (d_lora,) = pull(d_hidden_BTD)
        d_lora = d_lora.replace(unembed=d_unembed)
        return jax.tree.map(jnp.add, grads, d_lora), scored

    whole = replicated(mesh)
    return Steps(
        forward=jax.jit(forward_step, out_shardings=whole),
        backward=jax.jit(backward_step, donate_argnums=2, out_shardings=whole),
        optimize=jax.jit(adamw_step, donate_argnums=(0, 1, 2), out_shardings=whole),
    )


def to_devices(batch: MicroBatch, choice: LossChoice, mesh: Mesh) -> Batch:
    """Copy a micro-batch to the devices, each its rows."""
    host = Batch(
        tokens_BT=batch.tokens_BT,
        positions_BT=batch.positions_BT,
        segments_BT=batch.segments_BT,
        targets_BTK=batch.targets_BTK,
        inputs=LossInputs(batch.weights_BTK, batch.old_logprobs_BTK, batch.advantages_BTK),
        choice=choice,
    )
    rows = sharding(mesh, batch.tokens_BT.shape, FSDP)
    where = jax.tree.map(lambda _: rows, host)
    return put(host, where.replace(choice=jax.tree.map(lambda _: replicated(mesh), choice)))


def _kept_bytes(cfg: ModelConfig, tokens: int, dtype: Any) -> int:
    """About what a backward pass without recomputation keeps for `tokens` tokens (attention scores are never kept)."""
    queries, keys = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim
    width = 6 * cfg.hidden + 4 * (queries + keys) + 5 * cfg.mlp
    return int(cfg.layers * tokens * width * jnp.dtype(dtype).itemsize)
