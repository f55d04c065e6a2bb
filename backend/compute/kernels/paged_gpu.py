"""Attention over pages on GPUs: a Pallas kernel through Triton, for any NVIDIA GPU from Ampere on.

JAX's own kernel (`jax.experimental.pallas.ops.gpu.paged_attention`) takes one layer with its heads before its pages, so
XLA would copy each layer out of the cache. It also takes only one query of each row. This kernel reads the pages of all
layers in place, and also takes the queries of a piece of a prompt. Scores never leave the chip.

If rows and heads are too few to keep a GPU busy, several programs share a row's pages, and their results are combined
by the logarithms of their denominators (Flash-Decoding, crfm.stanford.edu/2023/10/12/flashdecoding.html). Every program
writes its own block and sums in a fixed order, so results are reproducible.

Letters: S rows, Q queries of a row, H query heads, G key-value heads, r = H / G, d head dimension, L layers, N pages.
P positions of a page, W pages of a row's table, D splits of a row's pages, M = Q r. m, t, w: a program's tile of
queries, positions and head dimension; v dimensions of a value, and u of its tile.
"""

from __future__ import annotations

import functools
import operator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tinkerflow.backend.compute.kernels.triton_calls import LEAST_SIDE, MULTIPROCESSORS, triton_call
from tinkerflow.backend.compute.platforms import platform

_MOST_QUERIES, _POSITIONS = 64, 64  # of a tile of two-byte numbers; half of that in float32, to fit in shared memory
_WIDE = 256  # dimensions of a value; with more, tiles have fewer queries and positions
_PROGRAMS = 2 * MULTIPROCESSORS
_MASKED = -1e30

_Sums = tuple[jax.Array, jax.Array, jax.Array]  # of each query: highest score [m], sum of weights [m], of values [m, u]


def attend(
    cache_k: jax.Array,
    cache_v: jax.Array,
    layer: jax.Array,
    tables_SW: jax.Array,
    start_S: jax.Array,
    q_SQHd: jax.Array,
    window: int | None = None,
    sinks_H: jax.Array | None = None,
    values: int = 0,
    *,
    interpret: bool = False,
) -> jax.Array:
    """o [S, Q, H, v]: query i of a row sees positions 0 .. start_S + i of its pages.

    cache_k [L, N, G, d, P], cache_v [L, N, G, P, d]: the pages, including the keys and values of the queries' own
    positions. layer: int32 scalar. tables_SW int32: each row's pages. start_S int32: the position of each row's first
    query. q_SQHd: scaled queries; their dtype is used to compute. window: how many of the last positions a query sees;
    None: all. sinks_H: a score of each head in the softmax that has no value. values: how many of a key's first
    dimensions are its value, if cache_v has no dimensions; keys are then read once. interpret: run the kernel on a CPU,
    for tests.
    """
    S, Q, H, d = q_SQHd.shape
    (G, P), W = (cache_v.shape[2], cache_v.shape[3]), tables_SW.shape[1]
    separate_values, v = cache_v.shape[4] > 0, cache_v.shape[4] or values
    r, each = H // G, 4 // q_SQHd.dtype.itemsize
    M, u = Q * r, _tile(v)
    less = max(1, u // _WIDE)
    m = max(LEAST_SIDE, min(each * _MOST_QUERIES // 2 // less, pl.next_power_of_2(M)))
    blocks = pl.cdiv(M, m)
    D = min(pl.next_power_of_2(pl.cdiv(_PROGRAMS, S * G * blocks)), W)
    cut = _Cut(
        M=M, P=P, W=W, D=D, r=r, m=m, u=u, v=v,
        t=max(LEAST_SIDE, min(each * _positions(u) // 2 // less, P & -P)),
        separate_values=separate_values,
        parts=((0, d),) if separate_values or v == d else ((0, v), (v, d - v)),
        window=window,
        precision=jax.lax.Precision.HIGHEST if q_SQHd.dtype == jnp.float32 else None,  # else float32 would be TF32
        dtype=q_SQHd.dtype,
    )  # fmt: skip
    q = q_SQHd.reshape(S, Q, G, r, d).transpose(0, 2, 1, 3, 4).reshape(S, G, M, d)
    o, log_totals = triton_call(
        functools.partial(_kernel, cut),
        out_shape=[
            jax.ShapeDtypeStruct((D, S, G, M, v), q.dtype if D == 1 else jnp.float32),
            jax.ShapeDtypeStruct((D, S, G, M), jnp.float32),
        ],
        grid=(blocks * D, G, S),
        compiler_params=triton.CompilerParams(num_warps=4, num_stages=2),
        interpret=interpret,
        # `tests/accelerators/hlo_kernels.py` reads from the name how many positions a row's queries see.
        name="paged_attention" if window is None else f"paged_attention_of_{window + Q - 1}",
    )(jnp.reshape(layer, 1), tables_SW, start_S, q, cache_k, *((cache_v,) if separate_values else ()))
    shares = jax.nn.softmax(log_totals, axis=0)
    if sinks_H is not None:
        sinks_GM = jnp.tile(sinks_H.astype(jnp.float32).reshape(G, r), (1, Q))
        shares *= jax.nn.sigmoid(jax.nn.logsumexp(log_totals, axis=0) - sinks_GM)
    plain = D == 1 and sinks_H is None
    whole: jax.Array = o[0] if plain else jnp.sum(o * shares[..., None], axis=0).astype(q.dtype)
    return whole.reshape(S, G, Q, r, v).transpose(0, 2, 1, 3, 4).reshape(S, Q, H, v)


def _positions(u: int) -> int:
    """The positions of a tile of two-byte numbers. u: dimensions of its values."""
    return _POSITIONS // 2 if u == _WIDE and platform().little_shared_memory else _POSITIONS


@dataclass(frozen=True)
class _Cut:
    """How the work is cut into programs and tiles, in the module's letters.

    separate_values: values have a separate array; otherwise they are the first dimensions of keys. parts: the first
    dimension and the number of dimensions of each part of a key. window: as in `attend`. precision, dtype: of products.
    """

    M: int
    P: int
    W: int
    D: int
    r: int
    m: int
    t: int
    u: int
    v: int
    separate_values: bool
    parts: tuple[tuple[int, int], ...]
    window: int | None
    precision: jax.lax.Precision | None
    dtype: Any


def _kernel(cut: _Cut, layer_ref: Any, table_ref: Any, start_ref: Any, q_ref: Any, k_ref: Any, *refs: Any) -> None:
    """One program: m queries of a row over one split of its pages. refs: values if separate, then the results."""
    M, W, D, r, m, t, u, v = cut.M, cut.W, cut.D, cut.r, cut.m, cut.t, cut.u, cut.v
    v_ref, (o_ref, log_ref) = refs[0], refs[-2:]
    block, split, head, row = pl.program_id(0) // D, pl.program_id(0) % D, pl.program_id(1), pl.program_id(2)
    first, start, layer = block * m, start_ref[row], layer_ref[0]
    query_m = first + jnp.arange(m)

    def queries(begin: int, dims: int) -> jax.Array:
        w = _tile(dims)
        mine = (query_m < M)[:, None] & (jnp.arange(w) < dims)[None]
        return triton.load(q_ref.at[row, head, pl.ds(first, m), pl.ds(begin, w)], mask=mine, other=0)

    q_parts = [queries(*part) for part in cut.parts]
    seen_m = start + query_m // r

    def tile(i: jax.Array, sums: _Sums) -> _Sums:
        at = i % (cut.P // t) * t
        page = table_ref[row, i // (cut.P // t)]
        k_parts, v_tu = _keys_and_values(cut, k_ref, v_ref, (layer, page, head), at)
        return _added(cut, sums, q_parts, k_parts, v_tu, seen_m, i * t)

    last = start + jnp.minimum(first + m - 1, M - 1) // r  # the last position that a query of the tile sees
    tiles = jnp.minimum(last // t + 1, W * (cut.P // t))
    begin = 0 if cut.window is None else jnp.maximum(start + first // r - cut.window + 1, 0) // t
    share = pl.cdiv(tiles - begin, D)
    begin += split * share
    sums = (jnp.full(m, _MASKED, jnp.float32), jnp.zeros(m, jnp.float32), jnp.zeros((m, u), jnp.float32))
    top_m, total_m, out_mu = jax.lax.fori_loop(begin, jnp.minimum(begin + share, tiles), tile, sums)
    total_m = jnp.where(total_m > 0, total_m, 1.0)  # of a split without pages
    there = o_ref.at[split, row, head, pl.ds(first, m), pl.ds(0, u)]
    mine = (query_m < M)[:, None] & (jnp.arange(u) < v)[None]
    triton.store(there, (out_mu / total_m[:, None]).astype(o_ref.dtype), mask=mine)
    triton.store(log_ref.at[split, row, head, pl.ds(first, m)], top_m + jnp.log(total_m), mask=query_m < M)


def _keys_and_values(
    cut: _Cut, k_ref: Any, v_ref: Any, place: tuple[Any, Any, Any], at: jax.Array
) -> tuple[list[jax.Array], jax.Array]:
    """The parts of t keys, each [w, t], and their values [t, u].

    cut, k_ref, v_ref: the kernel's. place: layer, page and head. at: the place of the first key in the page.
    """
    t, u = cut.t, cut.u

    def keys(begin: int, dims: int) -> jax.Array:
        w = _tile(dims)
        there = jnp.broadcast_to((jnp.arange(w) < dims)[:, None], (w, t))
        return triton.load(k_ref.at[*place, pl.ds(begin, w), pl.ds(at, t)], mask=there, other=0.0).astype(cut.dtype)

    k_parts = [keys(*part) for part in cut.parts]
    if not cut.separate_values:
        return k_parts, k_parts[0].T
    there = jnp.broadcast_to((jnp.arange(u) < cut.v)[None], (t, u))
    v_tu = triton.load(v_ref.at[*place, pl.ds(at, t), pl.ds(0, u)], mask=there, other=0.0)
    return k_parts, v_tu.astype(cut.dtype)


def _added(
    cut: _Cut,
    sums: _Sums,
    q_parts: list[jax.Array],
    k_parts: list[jax.Array],
    v_tu: jax.Array,
    seen_m: jax.Array,
    first: jax.Array,
) -> _Sums:
    """The sums with a tile of positions added.

    cut: the kernel's. sums: before. q_parts [m, w], k_parts [w, t], v_tu: of these queries and positions. seen_m int32:
    the last position that each query sees. first: the tile's first position.
    """
    top_m, total_m, out_mu = sums
    products = (triton.dot(q, k, precision=cut.precision) for q, k in zip(q_parts, k_parts, strict=True))
    scores_mt = functools.reduce(operator.add, products)
    places_t = first + jnp.arange(cut.t)
    within_mt = places_t[None] <= seen_m[:, None]
    if cut.window is not None:
        within_mt &= places_t[None] > seen_m[:, None] - cut.window
    scores_mt = jnp.where(within_mt, scores_mt, _MASKED)
    higher_m = jnp.maximum(top_m, jnp.max(scores_mt, axis=1))
    weights_mt = jnp.exp(scores_mt - higher_m[:, None])
    shrink_m = jnp.exp(top_m - higher_m)
    part_mu = triton.dot(weights_mt.astype(v_tu.dtype), v_tu, precision=cut.precision)
    total_m = total_m * shrink_m + jnp.sum(weights_mt, axis=1)
    return higher_m, total_m, out_mu * shrink_m[:, None] + part_mu


def takes(d: int, values: int) -> bool:
    """Whether the kernel supports keys of `d` dimensions whose first `values` dimensions, if any, are their values."""
    return not values or all(dims == _tile(dims) for dims in (values, d - values) if dims)


def _tile(dims: int) -> int:
    """The side of a tile for `dims` dimensions."""
    return max(LEAST_SIDE, pl.next_power_of_2(dims))
