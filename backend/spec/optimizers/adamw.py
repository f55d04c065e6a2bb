"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, arXiv 1711.05101), as optax computes it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tinkerflow.backend.spec.optimizers import (
    Fraction,
    NotNegative,
    OptimizerParams,
    OptimizerSpec,
    Positive,
    Tree,
)


class AdamParams(OptimizerParams, frozen=True):
    """AdamW's parameters, with the SDK's defaults. `grad_clip_norm` is a global norm, 0 = off."""

    learning_rate: NotNegative = 1e-4
    beta1: Fraction = 0.9
    beta2: Fraction = 0.95
    eps: Positive = 1e-12
    weight_decay: NotNegative = 0.0
    grad_clip_norm: NotNegative = 0.0


def update(
    weights: Tree, grads: Tree, state: Mapping[str, Tree], count: Any, params: AdamParams
) -> tuple[Tree, dict[str, Tree]]:
    """Compute the weights and the state after a step.

    weights, grads: float32 arrays of the adapter's shapes; state: `mu` and `nu`, shaped alike. count: int32, the steps
    made before. params: float32 scalars.
    """
    import optax

    transform = optax.chain(
        optax.scale_by_adam(b1=params.beta1, b2=params.beta2, eps=params.eps),
        optax.add_decayed_weights(params.weight_decay),
        optax.scale_by_learning_rate(params.learning_rate),
    )
    before = (optax.ScaleByAdamState(count, state["mu"], state["nu"]), optax.EmptyState(), optax.EmptyState())
    updates, (adam, *_) = transform.update(grads, before, weights)
    return optax.apply_updates(weights, updates), {"mu": adam.mu, "nu": adam.nu}


OPTIMIZER = OptimizerSpec("adamw", params=AdamParams, state=("mu", "nu"), update=update)
