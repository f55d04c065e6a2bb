"""One token of linear attention on TPUs, computed in place in the pool of states: `delta_gpu` through Mosaic.

Letters: as in `delta_gpu`; b heads of a program.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

_HEADS = 8  # of a program: the rows of a tile of float32


def step(
    S_LNHkv: jax.Array,
    layer: jax.Array,
    places_B: jax.Array,
    q_BHk: jax.Array,
    k_BHk: jax.Array,
    v_BHv: jax.Array,
    decay_BH: jax.Array,
    beta_BH: jax.Array,
    *,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """The values that one token of each row reads, [B, H, v], and the pool, updated in place. Everything is float32.

    S_LNHkv: the states of all layers. layer: int32 scalar. places_B int32: the row's state; 0 = none, which is read but
    not written. q_BHk: scaled. k_BHk, v_BHv, beta_BH: as in `delta_rule`. decay_BH: the factor of the old state; where
    it is 0, the state counts as zeros. interpret: run the kernel on a CPU, for tests.
    """
    (_, _, H, k, v), B = S_LNHkv.shape, len(places_B)
    b = _HEADS if H % _HEADS == 0 else H

    def kernel(layer_ref: Any, place_ref: Any, *refs: Any) -> None:
        S_ref, q_ref, k_ref, v_ref, decay_ref, beta_ref, o_ref, new_ref = refs
        kept = place_ref[pl.program_id(0)] == 0
        q_kb, k_kb = q_ref[0].T, k_ref[0].T
        for head in range(b):
            one = slice(head, head + 1)
            before_kv, decay_1v, key_k1 = S_ref[0, 0, head], decay_ref[0, one], k_kb[:, one]
            S_kv = jnp.where(decay_1v == 0, 0, before_kv * decay_1v)
            change_1v = (v_ref[0, one] - jnp.sum(S_kv * key_k1, axis=0, keepdims=True)) * beta_ref[0, one]
            S_kv = S_kv + key_k1 * change_1v
            o_ref[0, one] = jnp.sum(S_kv * q_kb[:, one], axis=0, keepdims=True)
            new_ref[0, 0, head] = jnp.where(kept, before_kv, S_kv)

    def of_row(size: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, b, size), lambda row, block, layer, places: (row, block, 0))

    pool = pl.BlockSpec((1, 1, b, k, v), lambda row, block, layer, places: (layer[0], places[row], block, 0, 0))
    decay_BHv, beta_BHv = (jnp.broadcast_to(x[..., None], v_BHv.shape) for x in (decay_BH, beta_BH))
    o_BHv, S_LNHkv = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(v_BHv.shape, jnp.float32), jax.ShapeDtypeStruct(S_LNHkv.shape, jnp.float32)],
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, H // b),
            in_specs=[pool, of_row(k), of_row(k), of_row(v), of_row(v), of_row(v)],
            out_specs=[of_row(v), pool],
        ),
        input_output_aliases={2: 1},
        cost_estimate=pl.CostEstimate(flops=8 * B * H * k * v, bytes_accessed=8 * B * H * k * v, transcendentals=0),
        interpret=interpret,
        name="delta_step",
    )(jnp.reshape(layer, 1), places_B, S_LNHkv, q_BHk, k_BHk, v_BHv, decay_BHv, beta_BHv)
    return o_BHv, S_LNHkv
