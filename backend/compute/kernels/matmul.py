"""Products with frozen matrices in Hugging Face's layout, [out, in].

Letters: M rows, i inputs, o outputs.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp

from tinkerflow.backend.compute.kernels import grouped_gpu
from tinkerflow.backend.compute.kernels.grouped_gpu import LastStep
from tinkerflow.backend.compute.platforms import TURING, on_cpu, platform
from tinkerflow.backend.compute.weights.quantized import FourBit, Int8, Weight

_FEW = 64  # rows; with 128 there is no gain
_FEW_BACKWARD = 32  # rows; with 64, turning products around slows a backward pass down
_EXPONENT = 0x7F800000  # of a float32: without the fraction's bits, a power of two
IN_PLACE = 256  # rows; with more, a GPU multiplies for longer than it copies a matrix
PACKED_IN_PLACE = 64  # rows; with more, several programs would decode the same weights


@flax.struct.dataclass
class OfLayer:
    """One layer's part of a stack of all layers, for a kernel that reads it in place.

    stack: a Weight [L, out, in], of experts [L, E, ...], or an adapter's pair. layer: int32, the number of the layer.
    """

    stack: Any
    layer: jax.Array

    @property
    def own(self) -> Any:
        """A copy of the layer's part."""
        return jax.tree.map(lambda part: jax.lax.dynamic_index_in_dim(part, self.layer, keepdims=False), self.stack)


def own_matrix(weight: Any) -> Any:
    """A layer's matrix: a copy of it if `weight` is `OfLayer`, otherwise `weight` itself."""
    return weight.own if isinstance(weight, OfLayer) else weight


def matmul(x: jax.Array, weight: Weight | OfLayer) -> jax.Array:
    """x [..., in] times the transpose of a base weight [out, in], in the dtype of x.

    Differentiable with respect to x, except with OfLayer.
    """
    if isinstance(weight, OfLayer):
        return matmuls(x, weight)[0]
    if isinstance(weight, Int8):
        return product(x, weight.values.astype(x.dtype)) * weight.scale
    if isinstance(weight, FourBit):
        return product(x, weight.dense(x.dtype))
    return product(x, weight)


def in_one_kernel(x: jax.Array, *weights: Weight | OfLayer) -> bool:
    """Whether `matmuls` computes all products in one kernel, which can add to the sums."""
    rows, stacks = math.prod(x.shape[:-1]), [weight.stack for weight in weights if isinstance(weight, OfLayer)]
    alike = len(stacks) == len(weights) and len({_kind(stack) for stack in stacks}) == 1
    return alike and not isinstance(stacks[0], Int8) and rows <= _most_in_place(stacks[0])


def matmuls(x: jax.Array, *weights: Weight | OfLayer, last: LastStep | None = None) -> tuple[jax.Array, ...]:
    """`matmul` of x with each weight. All matrices of one kind that are read in place share a kernel.

    last: the kernel's last step, for weights that are `in_one_kernel`.
    """
    x_Mi, found = x.reshape(-1, x.shape[-1]), dict[int, jax.Array]()
    kinds: dict[Any, list[tuple[int, OfLayer]]] = {}
    for number, weight in enumerate(weights):
        if not isinstance(weight, OfLayer):
            found[number] = matmul(x, weight)
        elif x_Mi.shape[0] > _most_in_place(weight.stack):
            found[number] = matmul(x, weight.own)
        else:
            kinds.setdefault(_kind(weight.stack), []).append((number, weight))
    for ours in kinds.values():
        stacks = [one.stack.values if isinstance(one.stack, Int8) else one.stack for _, one in ours]
        products = grouped_gpu.layer_products(x_Mi, stacks, [one.layer for _, one in ours], last)
        for (number, one), y_Mo in zip(ours, products, strict=True):
            y = y_Mo.reshape(*x.shape[:-1], -1)
            found[number] = y * one.own.scale if isinstance(one.stack, Int8) else y
    return tuple(found[number] for number in range(len(weights)))


def _kind(stack: Weight) -> Any:
    """A key that is equal for all stacks that one kernel can take together."""
    if isinstance(stack, FourBit):
        return stack.table, stack.packed.shape[-1] // stack.scale.shape[-1]
    return type(stack), stack.values.dtype if isinstance(stack, Int8) else stack.dtype


def _most_in_place(stack: Weight) -> int:
    """The maximum number of rows for which a matrix is read in place from its stack."""
    if isinstance(stack, FourBit):
        return PACKED_IN_PLACE if grouped_gpu.takes(stack) else 0
    return IN_PLACE


def product(x: jax.Array, weight_oi: jax.Array, dtype: Any = None) -> jax.Array:
    """x [..., in] times the transpose of weight_oi, in `dtype` (None = the dtype of x)."""
    x_Mi = x.reshape(-1, x.shape[-1])
    if on_cpu() and 1 < x_Mi.shape[0] <= _FEW:
        return _of_few_rows(dtype, x_Mi, weight_oi).reshape(*x.shape[:-1], -1)
    if platform() is TURING and x.dtype == jnp.bfloat16:
        return _in_halves(dtype, x_Mi, weight_oi).reshape(*x.shape[:-1], -1)
    return _plain(dtype, x, weight_oi)


def _halves(dtype: Any, x_Mi: jax.Array, weight_oi: jax.Array) -> jax.Array:
    """`_plain` for bfloat16, in float16 with sums in float32, for GPUs whose tensor cores do not support bfloat16.

    Each row of x is divided by the power of two below its largest number, so it cannot overflow. Numbers of at least
    2**-17 of that power keep all bits of bfloat16, as do weights of at least 2**-17. Smaller numbers lose bits, and
    become 0 below 2**-24.
    """
    largest_M1 = jnp.max(jnp.abs(x_Mi), axis=1, keepdims=True).astype(jnp.float32)
    bits_M1 = jax.lax.bitcast_convert_type(largest_M1, jnp.int32) & _EXPONENT
    power_M1 = jnp.where(bits_M1 > 0, jax.lax.bitcast_convert_type(bits_M1, jnp.float32), 1)
    halves_Mi = (x_Mi / power_M1).astype(jnp.float16)
    y_Mo = _plain(jnp.float32, halves_Mi, weight_oi.astype(jnp.float16))
    return (y_Mo * power_M1).astype(dtype or x_Mi.dtype)


def _halves_forward(dtype: Any, x_Mi: jax.Array, weight_oi: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _halves(dtype, x_Mi, weight_oi), (x_Mi, weight_oi)


def _halves_backward(dtype: Any, kept: tuple[jax.Array, jax.Array], d_y_Mo: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_Mi, weight_oi = kept
    d_weight_oi = jax.vjp(partial(_plain, dtype, x_Mi), weight_oi)[1](d_y_Mo)[0]
    return _halves(x_Mi.dtype, d_y_Mo, weight_oi.T), d_weight_oi


def _plain(dtype: Any, x: jax.Array, weight_oi: jax.Array) -> jax.Array:
    return jnp.einsum("...i,oi->...o", x, weight_oi, preferred_element_type=dtype)


def _turned(dtype: Any, x_Mi: jax.Array, weight_oi: jax.Array) -> jax.Array:
    """`_plain` with x on the right. The bits are equal for 64 rows, if `in` and `out` are multiples of 64.

    XLA:CPU packs the right-hand matrix at every call. For few rows, this takes as long as multiplying (16 rows: 1.5
    times as fast with x on the right, 64 rows: 1.1 times). Without the barrier, XLA would turn the product around
    again.
    """
    y_oM = jnp.einsum("oi,Mi->oM", weight_oi, x_Mi, preferred_element_type=dtype)
    return jax.lax.optimization_barrier(y_oM).T


def _forward(dtype: Any, x_Mi: jax.Array, weight_oi: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _turned(dtype, x_Mi, weight_oi), (x_Mi, weight_oi)


def _backward(dtype: Any, kept: tuple[jax.Array, jax.Array], d_y_Mo: jax.Array) -> tuple[jax.Array, jax.Array]:
    forward = _turned if d_y_Mo.shape[0] <= _FEW_BACKWARD else _plain
    d_x_Mi, d_weight_oi = jax.vjp(partial(forward, dtype), *kept)[1](d_y_Mo)
    return d_x_Mi, d_weight_oi


_in_halves = jax.custom_vjp(_halves, nondiff_argnums=(0,))
_in_halves.defvjp(_halves_forward, _halves_backward)
_of_few_rows = jax.custom_vjp(_turned, nondiff_argnums=(0,))
_of_few_rows.defvjp(_forward, _backward)
