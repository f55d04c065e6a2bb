"""Dimuon on an adapter: every LoRA matrix steps along the matrix sign of its averaged gradient.

The public documentation ("Optimizers", DimuonParams) gives: an average of the gradient with `beta1`, its matrix sign by
an iteration whose count and epsilon are the service's own, a direction of Frobenius norm sqrt(rank), no weight decay.
The iteration is Muon's (Jordan et al. 2024, "Muon: An optimizer for hidden layers"): Newton-Schulz with its quintic
coefficients. What is documented without a formula, and not in SDK 0.38's parameters, is left out: the row and column
preconditioner and the learning rate's correction by rank. Letters: R rank.
"""

from __future__ import annotations

import flax.struct
import jax
import jax.numpy as jnp
import optax

from tinkerflow.backend.compute.lora import Lora

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-30  # a gradient that is zero, as A's is while B is, gives no direction


@flax.struct.dataclass
class Momentum:
    """Dimuon's state: the averaged gradient, of the shape of the weights, float32."""

    average: Lora


def dimuon_update(lora: Lora, grads: Lora, state: Momentum, hyper: jax.Array) -> tuple[Lora, Momentum]:
    """The weights and state after one step with clipped gradients; hyper begins with learning rate and beta1."""
    rate, beta1 = hyper[0], hyper[1]
    average = optax.tree.update_moment(grads, state.average, beta1, 1)
    return jax.tree.map(lambda w, m: w - rate * direction(m), lora, average), Momentum(average)


def direction(matrix: jax.Array) -> jax.Array:
    """The matrix sign of [..., R, n], scaled to the Frobenius norm sqrt(R); zero of zero."""
    a, b, c = COEFFICIENTS
    x = matrix / (_norm(matrix) + EPSILON)
    # The iteration multiplies the smaller square: transposed where the rank is the longer side.
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if tall else x
    for _ in range(ITERATIONS):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = jnp.swapaxes(x, -1, -2) if tall else x
    return x * (matrix.shape[-2] ** 0.5 / (_norm(x) + EPSILON))


def _norm(x: jax.Array) -> jax.Array:
    return jnp.sqrt(jnp.sum(x * x, axis=(-1, -2), keepdims=True))
