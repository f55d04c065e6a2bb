"""Products with frozen matrices, which lie as Hugging Face stores them: [out, in].

Letters: M rows, i inputs, o outputs.
"""

from __future__ import annotations

import math
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from tinkerflow.backend.compute import grouped_gpu
from tinkerflow.backend.compute.platforms import on_cpu
from tinkerflow.backend.compute.quantized import Int8, Weight

_FEW = 32  # rows; with 64 there is no gain, and a training step of so few tokens takes a fifth longer
IN_PLACE = 256  # rows; with more, a GPU multiplies for longer than it copies a matrix


@flax.struct.dataclass
class OfLayer:
    """What one layer has of a stack of all layers, for a kernel that reads it there.

    stack: a Weight [L, out, in], that of experts [L, E, ...], or a pair of an adapter's. layer: int32.
    """

    stack: Any
    layer: jax.Array

    @property
    def own(self) -> Any:
        """A copy of the layer's own."""
        return jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, self.layer, keepdims=False), self.stack)


def matmul(x: jax.Array, weight: Weight | OfLayer) -> jax.Array:
    """x [..., in] times the transpose of a base weight [out, in], in the dtype of x.

    Differentiable by x, but for OfLayer.
    """
    if isinstance(weight, OfLayer):
        own = weight.own
        if math.prod(x.shape[:-1]) > IN_PLACE:
            return matmul(x, own)
        stack = weight.stack.values if isinstance(weight.stack, Int8) else weight.stack
        y = grouped_gpu.layer_product(x.reshape(-1, x.shape[-1]), stack, weight.layer)
        y = y.reshape(*x.shape[:-1], -1)
        return y * own.scale if isinstance(own, Int8) else y
    if isinstance(weight, Int8):
        return product(x, weight.values.astype(x.dtype)) * weight.scale
    return product(x, weight)


def product(x: jax.Array, weight_oi: jax.Array, dtype: Any = None) -> jax.Array:
    """x [..., in] times the transpose of weight_oi, as `dtype` (None = that of x)."""
    x_Mi = x.reshape(-1, x.shape[-1])
    if on_cpu() and 1 < x_Mi.shape[0] <= _FEW:
        # XLA:CPU packs the right-hand matrix at every call, which for few rows takes as long as multiplying. So x goes
        # on the right (16 rows: 1.5 to 1.8 times as fast). Without the barrier XLA would turn the product around again.
        y_oM = jax.lax.optimization_barrier(jnp.einsum("oi,Mi->oM", weight_oi, x_Mi, preferred_element_type=dtype))
        return y_oM.T.reshape(*x.shape[:-1], weight_oi.shape[0])
    return jnp.einsum("...i,oi->...o", x, weight_oi, preferred_element_type=dtype)
