"""The compiled steps of training: forward, forward and backward into donated gradients, optimizer step.

Frozen weights are arguments, because a jitted function cannot close over an array that spans processes. Output
shardings are pinned, because a first call and a restored state must use the same executable.

Letters: B rows, T tokens, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import FSDP, ROWS, TENSOR, in_pieces, put, replicated, sharding
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import layers_with, projections
from tinkerflow.backend.compute.models.layers.delta_rule import delta_rule_in_segments
from tinkerflow.backend.compute.models.layers.step import Mixers
from tinkerflow.backend.compute.models.lora import Lora, apply_one, gathered
from tinkerflow.backend.compute.models.transformer import (
    ForwardInputs,
    ImageFeatures,
    Keep,
    Params,
    experts_in_place,
    forward,
)
from tinkerflow.backend.compute.platforms import TPU, on_nvidia, platform
from tinkerflow.backend.compute.training.attention import attend_trees
from tinkerflow.backend.compute.training.budget import Budget, choose_keep, tokens_at_a_time
from tinkerflow.backend.compute.training.full_parameters import add_head_gradient, in_compute_dtype
from tinkerflow.backend.compute.training.logprobs import Scored, score, score_and_grads
from tinkerflow.backend.compute.training.optimizer import Leaf, OptimizerState, Stepped, step
from tinkerflow.backend.compute.training.packing import MicroBatch
from tinkerflow.backend.compute.training.token_losses import LossChoice, TokenInputs
from tinkerflow.backend.compute.training.trained import Trained, constrain_trained
from tinkerflow.backend.spec.losses import packed_inputs

Result = TypeVar("Result")
_NO_ADAPTER = Lora(layers={}, unembed=None)


@flax.struct.dataclass
class DeviceBatch:
    """A micro-batch on the devices, its rows split over ROWS, and its loss.

    If there are fewer rows than devices, each row is split into `pieces` pieces. The arrays have a row for each piece:
    B pieces of T tokens. Only the layers that mix tokens join the pieces. `ends` and `parents_BT` are columns of whole
    rows.

    Each array costs a copy to the devices, so there is one for each dtype. ints_BTI int32: tokens, positions, ends,
    then the K targets. floats_BTJK float32: the losses' inputs, in the order of `packed_inputs`. parents_BT: see
    `MicroBatch`; given only if examples share tokens and need their own program (`needs_tree_program`).
    routes_BTn int16 and supports_BTs int32: see `MicroBatch`.
    """

    ints_BTI: Leaf
    floats_BTJK: Leaf
    choice: LossChoice
    images: ImageFeatures | None = None
    parents_BT: Leaf | None = None
    routes_BTn: Leaf | None = None
    supports_BTs: Leaf | None = None
    pieces: int = flax.struct.field(pytree_node=False, default=1)  # type: ignore[no-untyped-call]

    @property
    def tokens(self) -> jax.Array:
        """The tokens, int32 [B, T]."""
        return cast(jax.Array, self.ints_BTI)[..., 0]

    @property
    def positions(self) -> jax.Array:
        """The positions, int32 [B, T], from 0 in each example."""
        return cast(jax.Array, self.ints_BTI)[..., 1]

    @property
    def ends(self) -> jax.Array:
        """The column where the subtree of each token ends, int32 [B, T]; see `MicroBatch`."""
        return cast(jax.Array, self.ints_BTI)[..., 2]

    @property
    def targets(self) -> jax.Array:
        """The tokens to score at each position, int32 [B, T, K]."""
        return cast(jax.Array, self.ints_BTI)[..., 3:]

    def routes(self, cfg: ModelConfig) -> jax.Array | None:
        """The given experts in every layer, int32 [B, T, L, k]; -1 = none. None if no token has any."""
        if self.routes_BTn is None:
            return None
        routes_BTn = cast(jax.Array, self.routes_BTn).astype(jnp.int32)
        return routes_BTn.reshape(*routes_BTn.shape[:2], cfg.layers, cfg.experts_per_token)

    @property
    def inputs(self) -> TokenInputs:
        """The other named inputs of the loss, each [B, T, K]."""
        floats_BTJK = cast(jax.Array, self.floats_BTJK)
        return {name: floats_BTJK[:, :, place] for place, name in enumerate(packed_inputs())}


@dataclass(frozen=True)
class Steps:
    """The jitted functions of training. Each is compiled once for every shape of batch and of adapter.

    forward(params, lora, batch) -> Scored.
    backward(params, lora, grads, batch) -> (grads, Scored). Adds the gradient of the loss. `grads` is donated.
    copy(grads) -> grads. For gradients that must survive a failing backward.
    optimize(lora, grads, state, hyper) -> Stepped. Everything except `hyper` is donated.

    If all parameters are trained, `lora` is a `Params` that holds them.
    """

    forward: Callable[[Params, Trained, DeviceBatch], Scored]
    backward: Callable[[Params, Trained, Trained, DeviceBatch], tuple[Trained, Scored]]
    copy: Callable[[Trained], Trained]
    optimize: Callable[[Trained, Trained, OptimizerState, Leaf], Stepped]


def make_steps(cfg: ModelConfig, mesh: Mesh, budget: Budget) -> Steps:
    """The steps of a model on a mesh. Adapters, gradients and moments have the shardings of `trained_shardings`.

    budget: the activations that a backward pass may keep. Training all parameters keeps at least each layer's input.
    """

    def constrain(x: jax.Array) -> jax.Array:
        return jax.lax.with_sharding_constraint(x, sharding(mesh, x.shape, ROWS))

    def hidden(
        params: Params, lora: Lora, batch: DeviceBatch, *, keep: Keep, some: int = 0, frozen: bool = True
    ) -> tuple[jax.Array, jax.Array | None]:
        save_memory, delta_rule = keep is Keep.GROUPS, None
        positions_BT = None if batch.parents_BT is None else batch.positions
        if cfg.delta is not None:
            parents_BT = cast("jax.Array | None", batch.parents_BT)
            assert batch.pieces == 1  # `check_context_parallel`
            delta_rule = delta_rule_in_segments(cfg.delta, batch.ends, mesh, positions_BT, parents_BT)
        attend = attend_trees(batch.ends, mesh, positions_BT, save_memory=save_memory, pieces=batch.pieces)
        inputs = ForwardInputs(
            tokens_BT=batch.tokens,
            positions_BT=batch.positions,
            mixers=Mixers(attend, delta_rule, recompute_heads=save_memory and on_nvidia()),
            lora_apply=apply_one,
            images=batch.images,
            constrain=constrain,
            keep=keep,
            tokens_at_once=some,
            in_place=experts_in_place(cfg, params) if frozen else frozenset(),
            routes_BTLk=batch.routes(cfg),
        )
        return forward(cfg, mesh, params, lora, inputs)

    def with_head(params: Params) -> Params:
        # Gather the unembedding over fsdp once, not for every chunk of logits.
        head = jax.lax.with_sharding_constraint(params.head, sharding(mesh, params.head.shape, TENSOR))
        return replace(params, unembed_VD=head)

    def at_head(
        scoring: Callable[..., Result],
        params: Params,
        lora: Lora,
        hidden_BTD: jax.Array,
        batch: DeviceBatch,
        **more: bool,
    ) -> Result:
        rows, supports = (batch.targets, batch.choice, batch.inputs), batch.supports_BTs
        return scoring(with_head(params), lora.unembed, hidden_BTD, *rows, mesh, supports_BTs=supports, **more)

    def kept(lora: Lora, params: Params, batch: DeviceBatch, budget: Budget = budget) -> Keep:
        tokens, dtype = batch.tokens.size // mesh.shape[FSDP], params.embed_VD.dtype
        return choose_keep(cfg, _ranks(cfg, lora), tokens, dtype, budget)

    def forward_step(params: Params, lora: Trained, batch: DeviceBatch) -> Scored:
        if isinstance(lora, Params):
            params, lora = in_compute_dtype(cfg, params, lora), _NO_ADAPTER
        lora = gathered(mesh, lora)
        hidden_BTD, equal_BT2 = hidden(params, lora, batch, keep=Keep.RESULTS)
        return replace(at_head(score, params, lora, hidden_BTD, batch), equal_BT2=equal_BT2)

    def full_backward(base: Params, weights: Params, grads: Trained, batch: DeviceBatch) -> tuple[Trained, Scored]:
        params = in_compute_dtype(cfg, base, weights)
        # Layers are not grouped, because each group would add gradients of all stacked weights.
        keep = kept(_NO_ADAPTER, base, batch, replace(budget, input_bytes=None))

        def of(weights: Params) -> tuple[jax.Array, jax.Array | None]:
            return hidden(in_compute_dtype(cfg, base, weights), _NO_ADAPTER, batch, keep=keep, frozen=False)

        hidden_BTD, pull, equal_BT2 = jax.vjp(of, weights, has_aux=True)
        scored, d_hidden_BTD, by_head = at_head(score_and_grads, params, _NO_ADAPTER, hidden_BTD, batch, by_head=True)
        (more,) = pull(d_hidden_BTD)
        more = add_head_gradient(more, by_head)
        added, scored = jax.tree.map(jnp.add, grads, more), replace(scored, equal_BT2=equal_BT2)
        return constrain_trained(cfg, mesh, added), jax.lax.with_sharding_constraint(scored, whole)

    def backward_step(params: Params, lora: Trained, grads: Trained, batch: DeviceBatch) -> tuple[Trained, Scored]:
        if isinstance(lora, Params):
            return full_backward(params, lora, grads, batch)
        lora = gathered(mesh, lora)
        keep = kept(lora, params, batch)
        some = tokens_at_a_time(keep)
        run = partial(hidden, params, batch=batch, keep=keep, some=some)
        hidden_BTD, pull, equal_BT2 = jax.vjp(run, lora, has_aux=True)
        scored, d_hidden_BTD, d_unembed = at_head(score_and_grads, params, lora, hidden_BTD, batch)
        (d_lora,) = pull(d_hidden_BTD)
        d_lora = d_lora.replace(unembed=d_unembed)
        added = constrain_trained(cfg, mesh, jax.tree.map(jnp.add, grads, d_lora))
        return added, jax.lax.with_sharding_constraint(replace(scored, equal_BT2=equal_BT2), whole)

    def optimize(lora: Trained, grads: Trained, state: OptimizerState, hyper: Leaf) -> Stepped:
        return constrain_trained(cfg, mesh, step(lora, grads, state, cast(jax.Array, hyper)))

    whole = replicated(mesh)
    return Steps(
        forward=jax.jit(forward_step, out_shardings=whole),
        backward=jax.jit(backward_step, donate_argnums=2),
        copy=jax.jit(lambda grads: constrain_trained(cfg, mesh, jax.tree.map(jnp.copy, grads))),
        optimize=jax.jit(optimize, donate_argnums=(0, 1, 2)),
    )


def needs_tree_program(cfg: ModelConfig) -> bool:
    """Whether a batch with shared tokens needs its own program.

    In the usual program, windows count the columns of a row, the states of linear attention pass from column to column,
    and the TPU kernel only compares examples.
    """
    windows = any(attention.window is not None for attention in cfg.attentions)
    return windows or cfg.delta is not None or platform() is TPU


def to_devices(
    batch: MicroBatch, choice: LossChoice, mesh: Mesh, images: ImageFeatures | None = None, *, trees: bool = False
) -> DeviceBatch:
    """Copy a micro-batch to the devices, with its images. Rows are split over ROWS. trees: see `needs_tree_program`."""
    single = (batch.tokens_BT, batch.positions_BT, batch.ends_BT)
    shape = in_pieces(mesh, *batch.tokens_BT.shape)

    def cut(array: Any) -> Any:
        return array.reshape(*shape, *array.shape[2:])

    host = DeviceBatch(
        ints_BTI=cut(np.concatenate([np.stack(single, axis=-1), batch.targets_BTK], axis=-1)),
        floats_BTJK=cut(np.stack([batch.inputs_BTK[name] for name in packed_inputs()], axis=2)),
        choice=choice,
        images=jax.tree.map(cut, images),
        parents_BT=cut(batch.parents_BT) if trees and batch.shares else None,
        routes_BTn=None if batch.routes_BTn is None else cut(batch.routes_BTn),
        supports_BTs=None if batch.supports_BTs is None else cut(batch.supports_BTs),
        pieces=shape[0] // len(batch.tokens_BT),
    )
    rows = sharding(mesh, shape, ROWS)
    features = jax.tree.map(lambda _: rows, images)
    optional = (host.parents_BT, host.routes_BTn, host.supports_BTs)
    parents, routes, supports = (None if leaf is None else rows for leaf in optional)
    choices = LossChoice(replicated(mesh))
    return put(host, DeviceBatch(rows, rows, choices, features, parents, routes, supports, host.pieces))


def _ranks(cfg: ModelConfig, lora: Lora) -> int:
    """The average sum of the ranks of all pairs that a token passes through in a layer."""
    matrices, homes = projections(cfg), layers_with(cfg)
    ranks = [pair.A.shape[-2] * matrices[name].per_token * len(homes[name]) for name, pair in lora.layers.items()]
    return sum(ranks) // cfg.layers
