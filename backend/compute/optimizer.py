"""AdamW on an adapter, with its hyper-parameters as data: changing them compiles nothing."""

from __future__ import annotations

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import optax

from backend.commands import AdamParams
from backend.compute.lora import Lora
from backend.errors import UserError


@flax.struct.dataclass
class Moments:
    """AdamW's state: `count` int32 scalar of steps made, `mu` and `nu` of the shape of the weights, float32."""

    count: Any
    mu: Lora
    nu: Lora


@flax.struct.dataclass
class Stepped:
    """What a step gives: the new state, gradients cleared, and the gradients' global norm before clipping."""

    lora: Lora
    grads: Lora
    moments: Moments
    norm: jax.Array


def hyper_vector(params: AdamParams) -> np.ndarray[Any, np.dtype[np.float32]]:
    """The parameters as `adamw_step` takes them, float32 [6]; UserError when one is not finite as such."""
    p = params
    with np.errstate(over="ignore"):
        vector = np.array([p.learning_rate, p.beta1, p.beta2, p.eps, p.weight_decay, p.grad_clip_norm], np.float32)
    if not np.isfinite(vector).all():
        raise UserError(f"optim_step: {params} holds a number that is not finite in float32")
    return vector


def adamw_step(lora: Lora, grads: Lora, moments: Moments, hyper: jax.Array) -> Stepped:
    """One step with decoupled weight decay after clipping the global norm to `grad_clip_norm` (0 = off).

    When the norm is not finite, weights and moments stay as they are; the gradients are cleared all the same.
    """
    rate, beta1, beta2, eps, decay, clip = hyper
    norm = optax.tree.norm(grads)
    factor = jnp.where((clip > 0) & (norm > clip), clip / norm, 1.0)
    clipped = jax.tree.map(lambda g: g * factor, grads)
    transform = optax.chain(
        optax.scale_by_adam(b1=beta1, b2=beta2, eps=eps),
        optax.add_decayed_weights(decay),
        optax.scale_by_learning_rate(rate),
    )
    state = (optax.ScaleByAdamState(*_fields(moments)), optax.EmptyState(), optax.EmptyState())
    updates, (adam, *_) = transform.update(clipped, state, lora)
    after = (optax.apply_updates(lora, updates), Moments(count=adam.count, mu=adam.mu, nu=adam.nu))
    finite = jnp.isfinite(norm)
    lora, moments = jax.tree.map(lambda new, old: jnp.where(finite, new, old), after, (lora, moments))
    return Stepped(lora=lora, grads=jax.tree.map(jnp.zeros_like, grads), moments=moments, norm=norm)


def _fields(moments: Moments) -> tuple[Any, Lora, Lora]:
    return moments.count, moments.mu, moments.nu
