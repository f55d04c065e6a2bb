"""One token of linear attention on GPUs, computed in place in the pool of states: a Pallas kernel through Triton.

XLA copies the states of a batch out of the pool and back. In between, it passes over them three times: for the decay
and the key, for the change, and for the query. This kernel reads a head's matrix once, and writes it once.

A program computes some columns of one head of one row, because the columns of a state are independent. It sums in a
fixed order, so results are reproducible.

Letters: as in `delta_rule`, with L layers and N states; w, t: a program's tile of k and v.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tinkerflow.backend.compute.kernels.grouped_gpu import side
from tinkerflow.backend.compute.kernels.triton_calls import triton_call

_COLUMNS = 32  # of a tile, so that its rows have 128 bytes


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
    it is 0, the state counts as zeros, even if it contains NaN. interpret: run the kernel on a CPU, for tests.
    """
    (_, _, H, k, v), B = S_LNHkv.shape, len(places_B)
    w, t = pl.next_power_of_2(k), side(v, _COLUMNS)

    def kernel(S_ref: Any, layer_ref: Any, place_ref: Any, *refs: Any) -> None:
        q_ref, k_ref, v_ref, decay_ref, beta_ref, o_ref, new_ref = refs
        row, head, first = pl.program_id(2), pl.program_id(1), pl.program_id(0) * t
        place, ins, outs = place_ref[row], jnp.arange(w) < k, first + jnp.arange(t) < v
        here, there_wt = (layer_ref[0], place, head, pl.ds(0, w), pl.ds(first, t)), ins[:, None] & outs[None]
        decay = decay_ref[row, head]
        S_wt = triton.load(S_ref.at[here], mask=there_wt, other=0)
        S_wt = jnp.where(decay == 0, 0, S_wt * decay)
        q_w1, k_w1 = (triton.load(ref.at[row, head, pl.ds(0, w)], mask=ins, other=0)[:, None] for ref in (q_ref, k_ref))
        wanted_t = triton.load(v_ref.at[row, head, pl.ds(first, t)], mask=outs, other=0)
        change_t = (wanted_t - jnp.sum(S_wt * k_w1, axis=0)) * beta_ref[row, head]
        S_wt = S_wt + k_w1 * change_t[None]
        triton.store(o_ref.at[row, head, pl.ds(first, t)], jnp.sum(S_wt * q_w1, axis=0), mask=outs)
        triton.store(new_ref.at[here], S_wt, mask=there_wt & (place > 0))

    o_BHv, S_LNHkv = triton_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct(v_BHv.shape, jnp.float32), jax.ShapeDtypeStruct(S_LNHkv.shape, jnp.float32)],
        grid=(pl.cdiv(v, t), H, B),
        input_output_aliases={0: 1},
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
        interpret=interpret,
        name="delta_step",
    )(S_LNHkv, jnp.reshape(layer, 1), places_B, q_BHk, k_BHk, v_BHv, decay_BH, beta_BH)
    return o_BHv, S_LNHkv
