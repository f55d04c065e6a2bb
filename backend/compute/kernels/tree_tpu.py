"""The kernels of `tree` for TPUs: Pallas through Mosaic.

The last axis of a grid loops over the blocks that a block sees, while the sums stay on the chip. A step after the last
seen block does nothing, and reads nothing because it names the same block again. Queries are in lanes, so maxima and
denominators are rows.

Letters: as in `tree`, with as many keys in a block as queries. e: dimension of values. r = H / G.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu

from tinkerflow.backend.compute.kernels.tree import How, Kernels, TreeRows, listed, sees

_BLOCK = 512  # tokens
_PLACES = 2**17  # of the lists of blocks: half of the chip's memory for scalars, 1 MiB

Place = tuple[Any, Any, Any, Any, Any]  # row, head, key-value head, block of queries, block of keys


def _forward(
    how: How, q: jax.Array, k: jax.Array, v: jax.Array, tree: TreeRows, sinks_H: jax.Array
) -> tuple[jax.Array, jax.Array]:
    q, k, v = (jnp.swapaxes(x, 1, 2) for x in (q, k, v))
    (B, H, T, d), e = q.shape, v.shape[-1]
    r, n = H // k.shape[1], _block(B, T)
    by_query = _by_query(r)
    spec = _Specs(by_query, n)

    def kernel(places_ref: Any, counts_ref: Any, sinks_ref: Any, *refs: Any) -> None:
        *tree_refs, q_ref, k_ref, v_ref, o_ref, log_total_ref, top_ref, total_ref, sum_ref = refs
        b, h, _, i, j = by_query(*map(pl.program_id, range(4)), places_ref, counts_ref)
        step = pl.program_id(3)

        @pl.when(step == 0)
        def begin() -> None:
            sink = sinks_ref[h]
            top_ref[...] = jnp.full_like(top_ref, sink)
            total_ref[...] = jnp.full_like(total_ref, jnp.where(sink > -jnp.inf, 1.0, 0.0))
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(step < counts_ref[b, i])
        def add() -> None:
            scores_mn, before_1n = _scores(how, q_ref[...], k_ref[...], i, j, *tree_refs), top_ref[...]
            top_1n = jnp.maximum(before_1n, jnp.max(scores_mn, axis=0, keepdims=True))
            weights_mn, less_1n = jnp.exp2(scores_mn - top_1n), jnp.exp2(before_1n - top_1n)
            top_ref[...] = top_1n
            total_ref[...] = total_ref[...] * less_1n + jnp.sum(weights_mn, axis=0, keepdims=True)
            sum_ref[...] = sum_ref[...] * less_1n + _dot(v_ref[...], weights_mn.astype(v_ref.dtype), (0, 0))

        @pl.when(step == T // n - 1)
        def end() -> None:
            o_ref[...] = (sum_ref[...] / total_ref[...]).T.astype(o_ref.dtype)
            log_total_ref[...] = top_ref[...] + jnp.log2(total_ref[...])

    o, log_totals = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((B, H, T, e), v.dtype), jax.ShapeDtypeStruct((B, H, 1, T), jnp.float32)],
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(B, H, T // n, T // n),
            in_specs=[*spec.tree, spec.queries(d), spec.keys(d), spec.keys(e)],
            out_specs=[spec.queries(e), spec.numbers],
            scratch_shapes=[tpu.VMEM(shape, jnp.float32) for shape in ((1, n), (1, n), (e, n))],
        ),
        name="tree_attention_forward",
        **_compiled(how, q, 2, sums=1),
    )(*listed(how.seen_blocks(tree, n, n)), sinks_H, *_rows(tree), q, k, v)
    return jnp.swapaxes(o, 1, 2), log_totals[:, :, 0]


def _slopes(
    how: How,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    tree: TreeRows,
    d_o: jax.Array,
    log_totals: jax.Array,
    means: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    q, k, v, d_o = (jnp.swapaxes(x, 1, 2) for x in (q, k, v, d_o))
    (B, H, T, d), (_, G, _, e) = q.shape, v.shape
    r, n = H // G, _block(B, T)
    by_query, by_key = _by_query(r), _by_key(r)
    seen = how.seen_blocks(tree, n, n)
    given = (*_rows(tree), q, k, v, d_o, log_totals[:, :, None], means[:, :, None])

    def weights_and_slopes(place: Place, refs: list[Any]) -> tuple[jax.Array, jax.Array]:
        """The weights, and the slopes of the scores, [m, n]."""
        *tree_refs, q_ref, k_ref, v_ref, d_o_ref, log_total_ref, mean_ref = refs
        scores_mn = _scores(how, q_ref[...], k_ref[...], *place[3:], *tree_refs)
        weights_mn = jnp.exp2(scores_mn - log_total_ref[...])
        return weights_mn, weights_mn * (_dot(v_ref[...], d_o_ref[...], (1, 1)) - mean_ref[...])

    def queries_kernel(places_ref: Any, counts_ref: Any, *refs: Any) -> None:
        *given_refs, d_q_ref, sum_ref = refs
        place = by_query(*map(pl.program_id, range(4)), places_ref, counts_ref)
        step, k_ref = pl.program_id(3), given_refs[4]

        @pl.when(step == 0)
        def begin() -> None:
            sum_ref[...] = jnp.zeros_like(sum_ref)

        @pl.when(step < counts_ref[place[0], place[3]])
        def add() -> None:
            _, d_scores_mn = weights_and_slopes(place, given_refs)
            sum_ref[...] += _dot(k_ref[...], d_scores_mn.astype(k_ref.dtype), (0, 0))

        @pl.when(step == T // n - 1)
        def end() -> None:
            d_q_ref[...] = (sum_ref[...] * how.scale).T.astype(d_q_ref.dtype)

    def keys_kernel(places_ref: Any, counts_ref: Any, *refs: Any) -> None:
        *given_refs, d_k_ref, d_v_ref, k_sum_ref, v_sum_ref = refs
        place = by_key(*map(pl.program_id, range(5)), places_ref, counts_ref)
        (head, step), q_ref, d_o_ref = map(pl.program_id, (3, 4)), given_refs[3], given_refs[6]

        @pl.when((head == 0) & (step == 0))
        def begin() -> None:
            k_sum_ref[...] = jnp.zeros_like(k_sum_ref)
            v_sum_ref[...] = jnp.zeros_like(v_sum_ref)

        @pl.when(step < counts_ref[place[0], place[4]])
        def add() -> None:
            weights_mn, d_scores_mn = weights_and_slopes(place, given_refs)
            k_sum_ref[...] += _dot(d_scores_mn.astype(q_ref.dtype), q_ref[...], (1, 0))
            v_sum_ref[...] += _dot(weights_mn.astype(d_o_ref.dtype), d_o_ref[...], (1, 0))

        @pl.when((head == r - 1) & (step == T // n - 1))
        def end() -> None:
            d_k_ref[...] = (k_sum_ref[...] * how.scale).astype(d_k_ref.dtype)
            d_v_ref[...] = v_sum_ref[...].astype(d_v_ref.dtype)

    def specs(spec: _Specs) -> list[pl.BlockSpec]:
        """The blocks of `given`."""
        numbers = [spec.numbers, spec.numbers]
        return [*spec.tree, spec.queries(d), spec.keys(d), spec.keys(e), spec.queries(e), *numbers]

    queries, keys = _Specs(by_query, n), _Specs(by_key, n)
    d_q = pl.pallas_call(
        queries_kernel,
        out_shape=q,
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, H, T // n, T // n),
            in_specs=specs(queries),
            out_specs=queries.queries(d),
            scratch_shapes=[tpu.VMEM((d, n), jnp.float32)],
        ),
        name="tree_attention_dq",
        **_compiled(how, q, 3, sums=1),
    )(*listed(seen), *given)
    d_k, d_v = pl.pallas_call(
        keys_kernel,
        out_shape=[k, v],
        grid_spec=tpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(B, G, T // n, r, T // n),
            in_specs=specs(keys),
            out_specs=[keys.keys(d), keys.keys(e)],
            scratch_shapes=[tpu.VMEM((n, d), jnp.float32), tpu.VMEM((n, e), jnp.float32)],
        ),
        name="tree_attention_dkv",
        **_compiled(how, q, 4, sums=2),
    )(*listed(jnp.swapaxes(seen, 1, 2)), *given)
    return jnp.swapaxes(d_q, 1, 2), jnp.swapaxes(d_k, 1, 2), jnp.swapaxes(d_v, 1, 2)


KERNELS = Kernels(_forward, _slopes)


def _block(B: int, T: int) -> int:
    """The tokens of a block. Very long rows have larger blocks, because lists of blocks grow with the square of T."""
    return math.gcd(_BLOCK if B * (T // _BLOCK) ** 2 <= _PLACES else 2 * _BLOCK, T)


def _by_query(r: int) -> Callable[..., Place]:
    """The function that finds the place of a step of a program (b, h, i)."""

    def place(b: Any, h: Any, i: Any, step: Any, places_ref: Any, counts_ref: Any, *_: Any) -> Place:
        return b, h, jax.lax.div(h, r), i, places_ref[b, i, jnp.minimum(step, counts_ref[b, i] - 1)]

    return place


def _by_key(r: int) -> Callable[..., Place]:
    """The function that finds the place of a step of a program (b, g, j). Steps loop over heads of g and queries."""

    def place(b: Any, g: Any, j: Any, head: Any, step: Any, places_ref: Any, counts_ref: Any, *_: Any) -> Place:
        return b, g * r + head, g, places_ref[b, j, jnp.minimum(step, counts_ref[b, j] - 1)], j

    return place


@dataclass(frozen=True)
class _Specs:
    """The blocks of n tokens, at a place, of arrays [B, H or G, T, dimension], [B, H, 1, T] and `_rows`."""

    place: Callable[..., Place]
    n: int

    def queries(self, dims: int) -> pl.BlockSpec:
        return self._spec((None, None, self.n, dims), lambda b, h, g, i, j: (b, h, i, 0))

    def keys(self, dims: int) -> pl.BlockSpec:
        return self._spec((None, None, self.n, dims), lambda b, h, g, i, j: (b, g, j, 0))

    @property
    def numbers(self) -> pl.BlockSpec:
        """The blocks of one number for each query."""
        return self._spec((None, None, 1, self.n), lambda b, h, g, i, j: (b, h, 0, i))

    @property
    def tree(self) -> list[pl.BlockSpec]:
        """The blocks of `_rows`."""
        of_query = self._spec((None, 1, self.n), lambda b, h, g, i, j: (b, 0, i))
        of_key = self._spec((None, 1, self.n), lambda b, h, g, i, j: (b, 0, j))
        return [of_key, of_query, of_key]

    def _spec(self, shape: tuple[int | None, ...], pick: Callable[..., tuple[Any, ...]]) -> pl.BlockSpec:
        return pl.BlockSpec(shape, lambda *step: pick(*self.place(*step)))


def _rows(tree: TreeRows) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The ends of keys, the positions of queries, and the positions of keys, each [B, 1, T]."""
    ends_B1T, positions_B1T = (x[:, None] for x in tree)
    return ends_B1T, positions_B1T, positions_B1T


def _scores(
    how: How, q_nd: jax.Array, k_md: jax.Array, i: Any, j: Any, end_ref: Any, of_query_ref: Any, of_key_ref: Any
) -> jax.Array:
    """The scores [m, n] of the queries of block i and the keys of block j. The last three arguments: `_rows`."""
    n = len(q_nd)
    query_mn, key_mn = (
        first * n + jax.lax.broadcasted_iota(jnp.int32, (n, n), axis) for first, axis in ((i, 1), (j, 0))
    )
    seen_mn = sees(how.window, query_mn, key_mn, end_ref[0][:, None], of_query_ref[...], of_key_ref[0][:, None])
    return how.scores(_dot(k_md, q_nd, (1, 1)), seen_mn)


def _dot(left: jax.Array, right: jax.Array, axes: tuple[int, int]) -> jax.Array:
    """The product, summed over these axes, in float32."""
    dims = (((axes[0],), (axes[1],)), ((), ()))
    return jax.lax.dot_general(left, right, dims, preferred_element_type=jnp.float32)


def _compiled(how: How, q: jax.Array, products: int, sums: int) -> dict[str, Any]:
    """The other arguments of `pallas_call`.

    products: the number of matmuls of the size of the scores. sums: the number of axes of the grid that are summed
    over. The flops are counted for a row of one sequence, which needs the most.
    """
    B, H, T, _ = q.shape
    cost = pl.CostEstimate(flops=products * q.size * T, bytes_accessed=4 * q.nbytes, transcendentals=B * H * T * T // 2)
    kinds: Any = ("parallel",) * 3 + ("arbitrary",) * sums
    return {
        "compiler_params": tpu.CompilerParams(dimension_semantics=kinds),
        "cost_estimate": cost,
        "interpret": how.interpret,
    }
