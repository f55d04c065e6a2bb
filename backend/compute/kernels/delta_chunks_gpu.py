"""Linear attention from chunk to chunk on GPUs, in training and prefill: Pallas kernels through Triton.

For each chunk, XLA starts about ten kernels, and most of them read or write all states. These kernels loop over the
chunks with a tile of a state in registers. In the backward pass, XLA computes the products that do not depend on a
later chunk, for all chunks at once.

A program computes some columns of one head of one row, because the columns of a state are independent. It sums in a
fixed order, so results are reproducible.

Letters: n chunks, B rows, h key heads, H value heads, c and s tokens of a chunk, k and v the dimensions of a key and a
value head; w, t: a program's tile of k and v.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton

from tinkerflow.backend.compute.kernels.grouped_gpu import side
from tinkerflow.backend.compute.kernels.triton_calls import LEAST_SIDE, triton_call

_COLUMNS = 32  # of a tile, so that its rows have 128 bytes


class ChunkParts(NamedTuple):
    """Factors of the recurrence, float32.

    queries, keys: [n, B, h, c, k]. values: the wanted values, [n, B, H, c, v]. readers: the keys that read the state
    for them, [n, B, H, c, k]. reads: the weights with which a token reads the changes of earlier ones, [n, B, H, c, s].
    last: the decay from each token to the end of its chunk, [n, B, H, c]. kept: the share of the state that each token
    reads, [n, B, H, c]; the last token's share is left at the end of the chunk.
    """

    queries: jax.Array
    keys: jax.Array
    values: jax.Array
    readers: jax.Array
    reads: jax.Array
    last: jax.Array
    kept: jax.Array


class ChunkBranches(NamedTuple):
    """Which chunks start from the saved state, and after which chunks the state is saved: int32 [n, B], 0 or 1."""

    branches: jax.Array
    saves: jax.Array


def mix_chunks(
    S_BHkv: jax.Array, parts: ChunkParts, turns: ChunkBranches | None, dtype: Any, *, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The values that tokens read, [B, n c, H, v] in `dtype`, and the last state, float32.

    A chunk's change is values - readers S. Its tokens read kept (queries S) + reads change. The next state is S times
    the share that is left + keysᵀ (last change).

    S_BHkv: the state before the first chunk, float32. turns: for rows with shared tokens. interpret: run the kernels on
    a CPU, for tests.
    """
    return _mixed(S_BHkv, parts, turns, dtype, interpret)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _mixed(
    S_BHkv: jax.Array, parts: ChunkParts, turns: ChunkBranches | None, dtype: Any, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    (n, B, H, c, v), given = parts.values.shape, {"S": S_BHkv, **parts._asdict(), **_named(turns)}
    results = {"o": jax.ShapeDtypeStruct((B, n, c, H, v), dtype), "end": _like(S_BHkv)}
    o, end_BHkv = _call(_read, given, results, parts, "delta_chunks", interpret)
    return o.reshape(B, n * c, H, v), end_BHkv


def _forward(S_BHkv: jax.Array, parts: ChunkParts, turns: ChunkBranches | None, dtype: Any, interpret: bool) -> Any:
    """Another call computes the states and the changes. Rematerialization repeats only this call."""
    factors = {name: part for name, part in parts._asdict().items() if name not in ("queries", "reads")}
    results = {"starts": _like(S_BHkv, len(parts.kept)), "change": _like(parts.values)}
    given = {"S": S_BHkv, **factors, **_named(turns)}
    saved = _call(_change, given, results, parts, "delta_chunk_states", interpret)
    return _mixed(S_BHkv, parts, turns, dtype, interpret), (parts, turns, *saved)


def _backward(dtype: Any, interpret: bool, saved: Any, slopes: tuple[jax.Array, jax.Array]) -> Any:
    (parts, turns, starts, change), (d_o_BTHv, d_end_BHkv) = saved, slopes
    (n, B, H, c, v), h = parts.values.shape, parts.keys.shape[2]
    d_o = d_o_BTHv.reshape(B, n, c, H, v)
    factors = {name: part for name, part in parts._asdict().items() if name != "values"}
    given = {"S": d_end_BHkv, **factors, **_named(turns), "d_o": d_o}
    results = {"d_next": _like(starts), "d_values": _like(change), "d_S": _like(d_end_BHkv)}
    d_next, d_values, d_S_BHkv = _call(_differentiate, given, results, parts, "delta_chunks_backward", interpret)
    d_o = d_o.astype(jnp.float32).transpose(1, 0, 3, 2, 4)
    by_state = partial(jnp.einsum, "nbhcv,nbhkv->nbhck")
    d_read, d_written = by_state(d_o, starts), by_state(change, d_next)

    def of_key_head(x: jax.Array) -> jax.Array:
        return jnp.sum(x.reshape(n, B, h, -1, *x.shape[3:]), axis=3)

    def each(x: jax.Array) -> jax.Array:
        return jnp.repeat(x, H // h, axis=2)

    left = jnp.where(jnp.arange(c) == c - 1, jnp.sum(d_next * starts, axis=(-2, -1))[..., None], 0)
    d_parts = ChunkParts(
        queries=of_key_head(d_read * parts.kept[..., None]),
        keys=of_key_head(d_written * parts.last[..., None]),
        values=d_values,
        readers=-by_state(d_values, starts),
        reads=jnp.einsum("nbhcv,nbhsv->nbhcs", d_o, change),
        last=jnp.sum(d_written * each(parts.keys), axis=-1),
        kept=jnp.sum(d_read * each(parts.queries), axis=-1) + left,
    )
    return d_S_BHkv, d_parts, None


_mixed.defvjp(_forward, _backward)


def _named(turns: ChunkBranches | None) -> dict[str, jax.Array]:
    return turns._asdict() if turns else {}


def _read(tile: _HeadColumns, refs: Any) -> None:
    """The kernel of the results."""

    def read(i: jax.Array, S_wt: jax.Array, change_ct: jax.Array) -> None:
        queries_cw, reads_cs = tile.load(refs.queries, tile.of_keys(i), "ck"), tile.load(refs.reads, tile.here(i), "cc")
        o_ct = _dot(queries_cw, S_wt) * refs.kept[i, tile.row, tile.head, :][:, None] + _dot(reads_cs, change_ct)
        tile.store(refs.o, tile.in_row(i), "cv", o_ct)

    tile.store(refs.end, tile.state, "kv", _loop(tile, refs, read))


def _change(tile: _HeadColumns, refs: Any) -> None:
    """The kernel of the states before chunks, and of the chunks' changes."""

    def keep(i: jax.Array, S_wt: jax.Array, change_ct: jax.Array) -> None:
        tile.store(refs.starts, tile.here(i), "kv", S_wt)
        tile.store(refs.change, tile.here(i), "cv", change_ct)

    _loop(tile, refs, keep)


def _loop(tile: _HeadColumns, refs: Any, of_chunk: Callable[[jax.Array, jax.Array, jax.Array], None]) -> jax.Array:
    """Call of_chunk(chunk, state before it, its change) for each chunk, and return the last state."""

    def chunk(i: jax.Array, states: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        S_wt, *saved = states
        if saved:
            S_wt = jnp.where(refs.branches[i, tile.row] > 0, saved[0], S_wt)
        change_ct = tile.load(refs.values, tile.here(i), "cv") - _dot(tile.load(refs.readers, tile.here(i), "ck"), S_wt)
        of_chunk(i, S_wt, change_ct)
        written_ct = change_ct * refs.last[i, tile.row, tile.head, :][:, None]
        S_wt = S_wt * refs.kept[i, tile.row, tile.head, tile.tokens - 1]
        S_wt += _dot(tile.load(refs.keys, tile.of_keys(i), "ck"), written_ct, trans_a=True)
        return (S_wt, jnp.where(refs.saves[i, tile.row] > 0, S_wt, saved[0])) if saved else (S_wt,)

    return jax.lax.fori_loop(0, tile.chunks, chunk, tile.states(refs))[0]


def _differentiate(tile: _HeadColumns, refs: Any) -> None:
    """The kernel of the derivatives of the state after each chunk, of the wanted values, and of the first state."""

    def chunk(done: jax.Array, slopes: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        (d_S_wt, *d_saved), i = slopes, tile.chunks - 1 - done
        if d_saved:
            saves = refs.saves[i, tile.row] > 0
            d_S_wt, d_saved = d_S_wt + jnp.where(saves, d_saved[0], 0), [jnp.where(saves, 0, d_saved[0])]
        tile.store(refs.d_next, tile.here(i), "kv", d_S_wt)
        last_c, kept_c = (ref[i, tile.row, tile.head, :] for ref in (refs.last, refs.kept))
        d_o_ct = tile.load(refs.d_o, tile.in_row(i), "cv").astype(jnp.float32)
        d_values_ct = _dot(tile.load(refs.keys, tile.of_keys(i), "ck"), d_S_wt) * last_c[:, None]
        d_values_ct += _dot(tile.load(refs.reads, tile.here(i), "cc"), d_o_ct, trans_a=True)
        tile.store(refs.d_values, tile.here(i), "cv", d_values_ct)
        d_S_wt = d_S_wt * refs.kept[i, tile.row, tile.head, tile.tokens - 1]
        d_S_wt += _dot(tile.load(refs.queries, tile.of_keys(i), "ck"), d_o_ct * kept_c[:, None], trans_a=True)
        d_S_wt -= _dot(tile.load(refs.readers, tile.here(i), "ck"), d_values_ct, trans_a=True)
        if not d_saved:
            return (d_S_wt,)
        branches = refs.branches[i, tile.row] > 0
        return jnp.where(branches, 0, d_S_wt), d_saved[0] + jnp.where(branches, d_S_wt, 0)

    d_S_wt, *_ = jax.lax.fori_loop(0, tile.chunks, chunk, tile.states(refs))
    tile.store(refs.d_S, tile.state, "kv", d_S_wt)


class _HeadColumns:
    """Inside a kernel: the columns of one head of one row. It loads and stores tiles of arrays.

    Places are indices with an ellipsis for the tile's rows. The axes "c", "k" and "v" are a chunk's tokens, all of a
    key, and the tile's columns of a value.
    """

    def __init__(self, parts: ChunkParts, columns: int) -> None:
        (self.chunks, _, H, self.tokens, v), (*_, h, _, k) = parts.values.shape, parts.keys.shape
        self.row, self.head, self._key_head = pl.program_id(2), pl.program_id(1), pl.program_id(1) // (H // h)
        self.state = self.row, self.head, ...
        self._axes: dict[str, tuple[Any, int, int]] = {
            "c": (0, self.tokens, self.tokens),
            "k": (0, max(LEAST_SIDE, pl.next_power_of_2(k)), k),
            "v": (pl.program_id(0) * columns, columns, v),
        }

    def here(self, chunk: jax.Array) -> tuple[Any, ...]:
        """The place in an array [n, B, H, ...]."""
        return chunk, self.row, self.head, ...

    def of_keys(self, chunk: jax.Array) -> tuple[Any, ...]:
        """The place in an array [n, B, h, ...]."""
        return chunk, self.row, self._key_head, ...

    def in_row(self, chunk: jax.Array) -> tuple[Any, ...]:
        """The place in an array [B, n, c, H, v]."""
        return self.row, chunk, ..., self.head

    def states(self, refs: Any) -> tuple[jax.Array, ...]:
        """The state before the first turn of a loop, and with branches also the saved state."""
        S_wt = self.load(refs.S, self.state, "kv")
        return (S_wt, jnp.zeros_like(S_wt)) if hasattr(refs, "saves") else (S_wt,)

    def load(self, ref: Any, place: tuple[Any, ...], axes: str) -> jax.Array:
        at, mask = self._at(ref, place, axes)
        return triton.load(at, mask=mask, other=0)

    def store(self, ref: Any, place: tuple[Any, ...], axes: str, tile: jax.Array) -> None:
        at, mask = self._at(ref, place, axes)
        triton.store(at, tile.astype(ref.dtype), mask=mask)

    def _at(self, ref: Any, place: tuple[Any, ...], axes: str) -> tuple[Any, jax.Array]:
        (first, rows, most), (start, columns, end) = (self._axes[axis] for axis in axes)
        mask = (first + jnp.arange(rows) < most)[:, None] & (start + jnp.arange(columns) < end)[None]
        indices = (pl.ds(first, rows) if index is ... else index for index in place)
        return ref.at[*indices, pl.ds(start, columns)], mask


def _dot(a: jax.Array, b: jax.Array, **transposed: bool) -> jax.Array:
    """The product of two float32 tiles with the precision of XLA's products."""
    exact = jax.config.jax_default_matmul_precision == "highest"  # type: ignore[attr-defined]
    return triton.dot(a, b, precision=jax.lax.Precision.HIGHEST if exact else None, **transposed)


def _like(x: jax.Array, *before: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct((*before, *x.shape), jnp.float32)


def _call(
    kernel: Callable[[_HeadColumns, Any], None],
    given: Mapping[str, jax.Array],
    results: Mapping[str, jax.ShapeDtypeStruct],
    parts: ChunkParts,
    name: str,
    interpret: bool,
) -> tuple[jax.Array, ...]:
    """The results of a kernel, which gets references to arrays by their names."""
    *_, B, H, _, v = parts.values.shape
    columns = side(v, _COLUMNS)

    def named(*refs: Any) -> None:
        kernel(_HeadColumns(parts, columns), SimpleNamespace(**dict(zip((*given, *results), refs, strict=True))))

    return tuple(
        triton_call(
            named,
            out_shape=list(results.values()),
            grid=(pl.cdiv(v, columns), H, B),
            compiler_params=triton.CompilerParams(num_warps=4, num_stages=1),
            interpret=interpret,
            name=name,
        )(*given.values())
    )
