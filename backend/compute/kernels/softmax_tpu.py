"""The softmax over the vocabulary on TPUs, without logits in memory: two Pallas kernels.

XLA:TPU writes logits in float32, and reads them again for the sum and for the gradient. Both kernels multiply by the
unembedding, and read it once for all rows that fit on the chip. `totals` computes the largest logit of a row and the
sum. `slopes` multiplies again and writes the gradient with respect to the logits. XLA computes the products with the
gradient. A core processes the tiles of the vocabulary in order, so results are reproducible.

Letters: M rows, D hidden, V vocabulary, K targets, R rank. r, n: sizes of a program's block of rows and of its tile of
the vocabulary; q: rows of a block that are computed at a time.
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

from tinkerflow.backend.compute.kernels.softmax import Product, Slopes, Totals

_COLUMNS, _AT_ONCE = 512, 512
# Shares of a core's memory on the chip, which is 128 MiB on v5e and v6e, and 64 MiB on v5p and v7x.
_OF_ROWS = 24 / 128  # for a block of rows; the chip holds two, so that the next block is read meanwhile
_OF_MEMORY = 100 / 128  # for the kernel
_ELSEWHERE = 128 * 2**20  # bytes to assume when other devices interpret the kernels
_LANES = 128

Each = Callable[[Any, jax.Array, jax.Array], None]  # (rows, logits_nq, place_nq): some rows, logits, and token ids


def totals(given: Product, *, keep: bool) -> Totals:
    """The totals over the whole vocabulary. keep: ignored, because `slopes` multiplies again."""
    del keep
    (M, K), cut = given.targets_MK.shape, _Tiling.of(given)

    def kernel(*refs: Any) -> None:
        *product, target_ref, largest_ref, total_ref, picked_ref = refs

        @pl.when(pl.program_id(1) == 0)
        def _() -> None:
            largest_ref[...] = jnp.full_like(largest_ref, -jnp.inf)
            total_ref[...] = jnp.zeros_like(total_ref)
            picked_ref[...] = jnp.zeros_like(picked_ref)

        def add(rows: Any, logits_nq: jax.Array, place_nq: jax.Array) -> None:
            before_1q = largest_ref[:, rows]
            largest_1q = jnp.maximum(before_1q, jnp.max(logits_nq, axis=0, keepdims=True))
            more_1q = jnp.sum(jnp.exp(logits_nq - largest_1q), axis=0, keepdims=True)
            total_ref[:, rows] = total_ref[:, rows] * jnp.exp(before_1q - largest_1q) + more_1q
            largest_ref[:, rows] = largest_1q

            @pl.loop(0, K)
            def _(k: jax.Array) -> None:
                one = pl.ds(k, 1)
                here_nq = place_nq == target_ref[one, rows]
                picked_ref[one, rows] += jnp.sum(jnp.where(here_nq, logits_nq, 0), axis=0, keepdims=True)

        cut.logits(product, add)

    largest_1M, total_1M, picked_KM = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((rows, M), jnp.float32) for rows in (1, 1, K)],
        out_specs=[cut.numbers(rows) for rows in (1, 1, K)],
        in_specs=[*cut.product, cut.numbers(K)],
        name="softmax_totals",
        **cut.how(written=0),
    )(*_factors(given), given.targets_MK.T)
    return Totals(largest_1M, total_1M, picked_KM.T)


def slopes(given: Product, totals: Totals, largest_M: jax.Array, log_total_M: jax.Array, slope_MK: jax.Array) -> Slopes:
    """The gradient with respect to the logits. A target named twice counts twice.

    All float32. given: the product. totals: not read. largest_M: the largest of a row's logits. log_total_M: the log of
    the sum of exp(logit - largest). slope_MK: the gradient with respect to each target's logprob.
    """
    del totals
    (M, K), cut = given.targets_MK.shape, _Tiling.of(given)

    def kernel(*refs: Any) -> None:
        *product, target_ref, largest_ref, log_total_ref, slope_ref, d_ref = refs

        def write(rows: Any, logits_nq: jax.Array, place_nq: jax.Array) -> None:
            sum_1q = jnp.sum(slope_ref[:, rows], axis=0, keepdims=True)

            def at_target(k: jax.Array, d_nq: jax.Array) -> jax.Array:
                one = pl.ds(k, 1)
                return d_nq + jnp.where(place_nq == target_ref[one, rows], slope_ref[one, rows], 0)

            weights_nq = jnp.exp(logits_nq - largest_ref[:, rows] - log_total_ref[:, rows])
            d_nq = jax.lax.fori_loop(0, K, at_target, weights_nq * -sum_1q)
            if given.cap:
                d_nq *= 1 - (logits_nq / given.cap) ** 2
            d_ref[:, rows] = d_nq.astype(d_ref.dtype)

        cut.logits(product, write)

    d_VM = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((cut.V, M), given.x_MD.dtype),
        out_specs=pl.BlockSpec((cut.n, cut.r), lambda i, j: (j, i)),
        in_specs=[*cut.product, *map(cut.numbers, (K, 1, 1, K))],
        name="softmax_again",
        **cut.how(written=cut.V * M * given.x_MD.dtype.itemsize),
    )(*_factors(given), given.targets_MK.T, largest_M[None], log_total_M[None], slope_MK.T)
    return Slopes(d_VM.T)


@dataclass(frozen=True)
class _Tiling:
    """The tiles of the product, in the module's letters, and the parts that both kernels share."""

    given: Product
    V: int
    r: int
    n: int
    q: int

    @classmethod
    def of(cls, given: Product) -> _Tiling:
        (M, D), V = given.x_MD.shape, given.head_VD.shape[0]
        r, most = M, _OF_ROWS * _memory()
        while r * D * given.x_MD.dtype.itemsize > most and r % (2 * _LANES) == 0:
            r //= 2
        q = math.gcd(r, _AT_ONCE)
        return cls(given, V, r, min(_COLUMNS, V), q if q % _LANES == 0 else r)

    def numbers(self, rows: int) -> pl.BlockSpec:
        """The block of an array [rows, M]."""
        return pl.BlockSpec((rows, self.r), lambda i, j: (0, i))

    @property
    def product(self) -> list[pl.BlockSpec]:
        """The blocks of `_factors`."""
        rows, columns = lambda i, j: (i, 0), lambda i, j: (j, 0)
        return [
            pl.BlockSpec((self.n if place % 2 else self.r, factor.shape[1]), columns if place % 2 else rows)
            for place, factor in enumerate(_factors(self.given))
        ]

    def how(self, written: int) -> dict[str, Any]:
        """The other arguments of `pallas_call`. written: bytes of the result that has a cell for each logit."""
        M, factors = self.given.x_MD.shape[0], _factors(self.given)
        blocks, logits = M // self.r, M * self.V
        read = sum(factor.nbytes * (blocks if place % 2 else 1) for place, factor in enumerate(factors))
        flops = 2 * logits * sum(factor.shape[1] for factor in factors[::2])
        return {
            "grid": (blocks, pl.cdiv(self.V, self.n)),
            "cost_estimate": pl.CostEstimate(flops=flops, bytes_accessed=read + written, transcendentals=logits),
            "compiler_params": tpu.CompilerParams(vmem_limit_bytes=int(_OF_MEMORY * _memory())),
            "interpret": self.given.interpret,
        }

    def logits(self, product: list[Any], each: Each) -> None:
        """Inside a kernel: pass a tile's logits to `each`, some rows at a time; -inf beyond the vocabulary."""
        x_ref, head_ref, *adapter = product
        tile, cap = pl.program_id(1), self.given.cap

        @pl.loop(0, self.r // self.q)
        def _(step: jax.Array) -> None:
            rows = pl.ds(pl.multiple_of(step * self.q, self.q), self.q)
            logits_nq = _dot(head_ref[...], x_ref[rows, :])
            if adapter:
                low_ref, B_ref = adapter
                logits_nq += _dot(B_ref[...], low_ref[rows, :])
            if cap:
                logits_nq = cap * jnp.tanh(logits_nq / cap)
            place_nq = tile * self.n + jax.lax.broadcasted_iota(jnp.int32, logits_nq.shape, 0)
            each(rows, jnp.where(place_nq < self.V, logits_nq, -jnp.inf), place_nq)


def _memory() -> int:
    """Bytes on the chip for one core of the devices that the surrounding `shard_map` is for."""
    return tpu.get_tpu_info().vmem_capacity_bytes if tpu.is_tpu_device() else _ELSEWHERE


def _factors(given: Product) -> list[jax.Array]:
    """The factors of the product: x_MD and head_VD, and with an adapter low_MR and B_VR."""
    if given.low_MR is None or given.B_RV is None:
        return [given.x_MD, given.head_VD]
    return [given.x_MD, given.head_VD, given.low_MR, given.B_RV.T.astype(given.low_MR.dtype)]


def _dot(a_nK: jax.Array, b_qK: jax.Array) -> jax.Array:
    precision = jax.lax.Precision.HIGHEST if a_nK.dtype == jnp.float32 else None
    contracted = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(a_nK, b_qK, contracted, precision=precision, preferred_element_type=jnp.float32)
