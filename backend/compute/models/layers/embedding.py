"""Rows of a table by token id, with a gradient that is added in float32.

Letters: B rows, T tokens, V vocabulary, N width of the table.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from tinkerflow.backend.compute.platforms import on_nvidia

_AT_ONCE = 1024  # tokens of each row


@jax.custom_vjp
def rows_of(table_VN: jax.Array, ids_BT: jax.Array) -> jax.Array:
    """The row of each id, [B, T, N] in the table's dtype. ids_BT int32.

    The derivative of plain indexing adds in the table's dtype: in bfloat16, a token's sum stops growing after 256 equal
    gradients. On GPUs, it also sorts B * T * N indices, so that the order of additions is fixed.
    """
    return table_VN[ids_BT]


def _forward(table_VN: jax.Array, ids_BT: jax.Array) -> Any:
    return table_VN[ids_BT], (table_VN, ids_BT)


def _backward(saved: tuple[jax.Array, jax.Array], d_BTN: jax.Array) -> tuple[jax.Array, None]:
    table_VN, ids_BT = saved
    zeros_VN = jnp.zeros(table_VN.shape, jnp.float32)
    if not on_nvidia():
        return zeros_VN.at[ids_BT].add(d_BTN.astype(jnp.float32)).astype(table_VN.dtype), None
    (B, T), t = ids_BT.shape, min(ids_BT.shape[1], _AT_ONCE)
    fill = -T % t
    ids_nBt = jnp.pad(ids_BT, ((0, 0), (0, fill)), constant_values=-1).reshape(B, -1, t).swapaxes(0, 1)
    d_nBtN = jnp.pad(d_BTN, ((0, 0), (0, fill), (0, 0))).reshape(B, -1, t, d_BTN.shape[-1]).swapaxes(0, 1)

    def add(total_VN: jax.Array, piece: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        ids_Bt, d_BtN = piece
        chosen_BtV = (ids_Bt[..., None] == jnp.arange(len(zeros_VN))).astype(d_BtN.dtype)
        added_VN = jnp.einsum(
            "btv,btn->vn",
            chosen_BtV,
            d_BtN,
            precision=jax.lax.Precision.HIGHEST,
            preferred_element_type=jnp.float32,
        )
        return total_VN + added_VN, None

    return jax.lax.scan(add, zeros_VN, (ids_nBt, d_nBtN))[0].astype(table_VN.dtype), None


rows_of.defvjp(_forward, _backward)
