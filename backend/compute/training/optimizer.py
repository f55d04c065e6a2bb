"""Optimizer steps on an adapter. Their parameters are data, so changing them compiles nothing.

The optimizers themselves are in `backend/spec/optimizers`, one file each.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import optax

from tinkerflow.backend.compute.training.trained import Trained
from tinkerflow.backend.spec.optimizers import OPTIMIZERS

# A leaf of a step's arguments: an array on the devices or the host, a shape (for the warm-up), or a sharding.
Leaf: TypeAlias = jax.Array | npt.NDArray[Any] | jax.ShapeDtypeStruct | jax.sharding.NamedSharding


@flax.struct.dataclass
class OptimizerState:
    """The state of an optimizer.

    count: steps made, int32 scalar. parts: named arrays, shaped like the weights. name: the optimizer's name; a step is
    compiled once for each name.
    """

    count: Leaf
    parts: dict[str, Trained]
    name: str = flax.struct.field(pytree_node=False)  # type: ignore[no-untyped-call]


@flax.struct.dataclass
class Stepped:
    """The result of a step: new weights and state, zero gradients, and the gradients' global norm before clipping."""

    lora: Trained
    grads: Trained
    state: OptimizerState
    norm: jax.Array


def fresh_state(optimizer: str, zeros: Trained) -> OptimizerState:
    """An optimizer's state before its first step, on the host. zeros: arrays of the shapes of the weights."""
    return OptimizerState(np.zeros((), np.int32), dict.fromkeys(OPTIMIZERS[optimizer].state, zeros), optimizer)


def step(lora: Trained, grads: Trained, state: OptimizerState, hyper: jax.Array) -> Stepped:
    """One step of the optimizer that `state` names, after clipping the gradients' global norm.

    hyper: the optimizer's parameters, float32, in the order of `OptimizerSpec.vector`. If the norm is not finite, the
    weights and the state do not change. The gradients are always cleared.
    """
    spec = OPTIMIZERS[state.name]
    params = dict(zip(spec.bounds, hyper, strict=True))
    clip = params["grad_clip_norm"]
    norm = optax.tree.norm(grads)
    factor = jnp.where((clip > 0) & (norm > clip), clip / norm, 1.0)
    clipped = jax.tree.map(lambda g: g * factor, grads)
    stepped, parts = spec.update(lora, clipped, state.parts, state.count, spec.params(**params))
    after = OptimizerState(optax.safe_increment(jnp.asarray(state.count)), parts, state.name)
    finite = jnp.isfinite(norm)
    lora, state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), (stepped, after), (lora, state))
    return Stepped(lora=lora, grads=jax.tree.map(jnp.zeros_like, grads), state=state, norm=norm)
