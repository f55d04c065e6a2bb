"""Optimizer steps on an adapter, with their hyper-parameters as data: changing them compiles nothing.

AdamW is here, Dimuon in its own file. `step` is what both have in common.
"""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from tinkerflow.backend.commands import AdamParams, DimuonParams, Optimizer
from tinkerflow.backend.compute.dimuon import Momentum, dimuon_update
from tinkerflow.backend.compute.lora import Lora
from tinkerflow.backend.errors import UserError


@flax.struct.dataclass
class Moments:
    """AdamW's state: `count` int32 scalar of steps made, `mu` and `nu` of the shape of the weights, float32."""

    count: Any
    mu: Lora
    nu: Lora


State = Moments | Momentum

# The order of the numbers that a step takes.
_ADAM = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
_DIMUON = ("learning_rate", "beta1", "grad_clip_norm")


@flax.struct.dataclass
class Stepped:
    """What a step gives: the new state, gradients cleared, and the gradients' global norm before clipping."""

    lora: Lora
    grads: Lora
    state: Any
    norm: jax.Array


def fresh_state(optimizer: Optimizer, zeros: Lora) -> State:
    """An optimizer's state before its first step, on the host; `zeros` are of the shape of the weights."""
    return Momentum(zeros) if optimizer == "dimuon" else Moments(count=np.int32(0), mu=zeros, nu=zeros)


def hyper_vector(params: AdamParams | DimuonParams) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The parameters as `step` takes them, float32, the clip norm last; UserError when one cannot be used as such."""
    names = _DIMUON if isinstance(params, DimuonParams) else _ADAM
    with np.errstate(over="ignore"):
        vector = np.array([getattr(params, name) for name in names], np.float32)
    if not np.isfinite(vector).all():
        raise UserError(f"optim_step: {params} holds a number that is not finite in float32")
    for name, number in zip(names, vector, strict=True):
        given = f"optim_step: {name} is {getattr(params, name)!r}, which is"
        if name in ("beta1", "beta2") and number >= 1:
            raise UserError(f"{given} 1 in float32: it must be below 1")
        if name == "eps" and number < np.finfo(np.float32).tiny:
            raise UserError(f"{given} 0 in float32: it must be at least 1.2e-38")
    return vector


def step(lora: Lora, grads: Lora, state: Moments | Momentum, hyper: jax.Array) -> Stepped:
    """One step, of the optimizer whose state it is, after clipping the global norm to hyper's last (<= 0 = off).

    When the norm is not finite, weights and state stay as they are; the gradients are cleared all the same.
    """
    clip = hyper[-1]
    norm = optax.tree.norm(grads)
    factor = jnp.where((clip > 0) & (norm > clip), clip / norm, 1.0)
    clipped = jax.tree.map(lambda g: g * factor, grads)
    after: tuple[Lora, State]
    if isinstance(state, Momentum):
        after = dimuon_update(lora, clipped, state, hyper)
    else:
        after = adamw_update(lora, clipped, state, hyper)
    finite = jnp.isfinite(norm)
    lora, state = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, (lora, state))
    return Stepped(lora=lora, grads=jax.tree.map(jnp.zeros_like, grads), state=state, norm=norm)


def adamw_update(lora: Lora, grads: Lora, moments: Moments, hyper: jax.Array) -> tuple[Lora, Moments]:
    """The weights and state after one AdamW step with decoupled weight decay."""
    rate, beta1, beta2, eps, decay, _ = hyper
    transform = optax.chain(
        optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(rate),
    )
    state = (optax.ScaleByAdamState(moments.count, moments.mu, moments.nu), optax.EmptyState(), optax.EmptyState())
    updates, (adam, *_) = transform.update(grads, state, lora)
    return optax.apply_updates(lora, updates), Moments(count=adam.count, mu=adam.mu, nu=adam.nu)
