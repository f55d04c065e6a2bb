"""Dimuon: every LoRA matrix steps along the matrix sign of its averaged gradient.

The public documentation ("Optimizers", DimuonParams) describes an average of the gradient with `beta1` and its matrix
sign, with a direction of Frobenius norm sqrt(rank) and no weight decay. We chose the number of iterations and the
epsilon for the matrix sign. The iteration is Muon's (Jordan et al. 2024, "Muon: An optimizer for hidden layers"):
Newton-Schulz with its quintic coefficients. Two parts are left out, because the documentation gives no formula and SDK
0.38 no parameters: the row and column preconditioner, and the learning rate's correction by rank.
Letters: R rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tinkerflow.backend.spec.optimizers import Finite, Fraction, NotNegative, OptimizerParams, OptimizerSpec, Tree

if TYPE_CHECKING:
    import jax

ITERATIONS = 5
COEFFICIENTS = (3.4445, -4.7750, 2.0315)
EPSILON = 1e-30  # a zero gradient, such as A's while B is zero, gives no direction
_TINY, _RAISED = 2.0**-40, 2.0**80  # entries below _TINY are multiplied by _RAISED


class DimuonParams(OptimizerParams, frozen=True):
    """Dimuon's parameters: `beta1` averages the gradient; `grad_clip_norm` is a global norm, 0 or less = off."""

    learning_rate: NotNegative
    beta1: Fraction = 0.9
    grad_clip_norm: Finite = 0.0


def update(
    weights: Tree, grads: Tree, state: Mapping[str, Tree], count: Any, params: DimuonParams
) -> tuple[Tree, dict[str, Tree]]:
    """Compute the weights and the averaged gradient after a step.

    weights, grads: float32 arrays of the adapter's shapes; state: `momentum`, shaped alike. count: int32, the steps
    made before, which are not used here. params: float32 scalars.
    """
    import jax
    import optax

    average = optax.tree.update_moment(grads, state["momentum"], params.beta1, 1)
    stepped = jax.tree.map(lambda w, m: w - params.learning_rate * direction(m), weights, average)
    return stepped, {"momentum": average}


def direction(matrix: jax.Array) -> jax.Array:
    """The matrix sign of [..., R, n], scaled to the Frobenius norm sqrt(R); zero of zero."""
    import jax.numpy as jnp

    def norm(x: jax.Array) -> jax.Array:
        return jnp.sqrt(jnp.sum(x * x, axis=(-1, -2), keepdims=True))

    a, b, c = COEFFICIENTS
    # Devices flush squares of tiny numbers to 0. A factor that is a power of two changes no bit of the direction.
    tiny = jnp.max(jnp.abs(matrix), axis=(-1, -2), keepdims=True) < _TINY
    x = jnp.where(tiny, matrix * _RAISED, matrix)
    x = x / (norm(x) + EPSILON)
    # Transpose if the rank is the longer side, so that the iteration multiplies the smaller square.
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.swapaxes(x, -1, -2) if tall else x
    for _ in range(ITERATIONS):
        gram = x @ jnp.swapaxes(x, -1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    x = jnp.swapaxes(x, -1, -2) if tall else x
    scaled: jax.Array = x * (matrix.shape[-2] ** 0.5 / (norm(x) + EPSILON))
    return scaled


OPTIMIZER = OptimizerSpec(
    "dimuon", params=DimuonParams, state=("momentum",), update=update, version=1, of_adapters=True
)
