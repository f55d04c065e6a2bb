"""From logits to tokens and logprobs: greedy, temperature, top-k, top-p and min-p, with a random number per row.

A token is drawn by inverting the cumulative distribution at one uniform number from the host (`UniformStream`), and the
thresholds of top-k and top-p are found by bisection over the bits of a float32. Nothing is sorted, no noise of
vocabulary size is generated, and the device has no random state. For one row of 151,936 logits on CPU: bisection 4 ms,
sort 130 ms; inversion 0.5 ms, Gumbel noise 9 ms.

Letters: S rows, V vocabulary, c columns and r rows of a folded vocabulary, n up to c columns, s tokens of a support.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np

from tinkerflow.backend.compute.mesh import Array
from tinkerflow.backend.spec.commands import Float32
from tinkerflow.backend.spec.supports import MOST_SUPPORTED

_TINY = float(np.finfo(np.float32).tiny)  # devices may flush smaller numbers to 0
_COLUMNS = 128
_WIDTHS = (8, 32, 128)
ALTERNATIVES = 2**63  # the index of the random numbers for a prompt's alternative tokens; no sample has this index
_BATCH = 128  # random numbers generated together; fewer cost the same
_ONE_BITS = 30  # the bits of floats in [0, 1] are integers below 2**30


@flax.struct.dataclass
class Choice:
    """How each row draws: temperature_S float32, 0: greedy; top_k_S int32, -1: off; top_p_S float32, 1: off.

    min_p_S float32, 0: off: a token's smallest allowed probability, relative to the most likely token's probability
    (Nguyen et al., arXiv 2407.01082).

    A temperature above 0 and a top_p are normal numbers: see `normal_temperature` and `normal_top_p`.

    filters: whether the program applies top-k, top-p and min-p before it draws tokens. None: the devices find out
    whether any row draws, and whether any row filters. The tokens are the same.
    """

    temperature_S: Array
    top_k_S: Array
    top_p_S: Array
    min_p_S: Array
    filters: bool | None = flax.struct.field(pytree_node=False, default=None)  # type: ignore[no-untyped-call]

    @property
    def row_filters(self) -> Any:
        """Whether each row has a top-k, a top-p or a min-p: bool [S], on the host if the rows are on the host."""
        return (self.top_k_S >= 0) | (self.top_p_S < 1) | (self.min_p_S > 0)

    @property
    def any_filter(self) -> Any:
        """Whether any row has a filter: a bool scalar, on the host if the rows are on the host."""
        return self.row_filters.any()


@flax.struct.dataclass
class SupportRows:
    """The tokens from which each row was drawn; see `spec.supports`.

    tokens_Ss int32: their ids, s = MOST_SUPPORTED, padded with -1. A row of only -1 is the whole vocabulary, or more
    than s tokens. log_mass_S float32: the log of their probability under the full untempered softmax; 0 for such a row.
    """

    tokens_Ss: Array
    log_mass_S: Array


class UniformStream:
    """The random numbers of one sequence: number i decides token i, independently of the batch.

    Philox with the key (seed, sample index) gives equal numbers on every machine and in every release of NumPy.
    """

    def __init__(self, seed: int, index: int) -> None:
        """seed: up to 64 bits; negative numbers as two's complement. index: the sample's index in its request."""
        self._bits = np.random.Philox(key=(seed & (2**64 - 1)) | index << 64)
        self._ready = np.zeros(0, np.float32)  # generated, but not returned yet

    def draw(self, count: int) -> Float32:
        """The next `count` numbers, float32 in (0, 1). They are never 0 or 1, which are outside every token's share."""
        if len(self._ready) < count:
            raw = self._bits.random_raw(max(count, _BATCH)) >> np.uint64(41)
            new = np.asarray((raw.astype(np.float64) + 0.5) * 2.0**-23, np.float32)
            self._ready = np.concatenate([self._ready, new])
        drawn, self._ready = self._ready[:count], self._ready[count:]
        return drawn

    def give_back(self, numbers: Float32) -> None:
        """Give back the last numbers drawn, so that they are drawn again next."""
        self._ready = np.concatenate([numbers, self._ready])


def normal_temperature(temperature: float) -> float:
    """The temperature, or 0 (greedy) if it is too small for a normal float32. Its inverse is also a normal float32."""
    return min(temperature, 1 / _TINY) if temperature >= _TINY else 0.0


def normal_top_p(top_p: float) -> float:
    """The top_p, or the smallest normal float32 if top_p is smaller. Both keep the most likely token."""
    return max(top_p, _TINY)


def width_for(wanted: int) -> int:
    """The padded width for a list of `wanted` tokens at each position: 0, 8, 32, 128, then powers of 2."""
    if wanted == 0:
        return 0
    return next((width for width in _WIDTHS if width >= wanted), 1 << (wanted - 1).bit_length())


def greedy_choice(rows: int) -> Choice:
    """Host arrays for `rows` rows that all decode greedily, like unused slots."""
    return Choice(
        temperature_S=np.zeros(rows, np.float32),
        top_k_S=np.full(rows, -1, np.int32),
        top_p_S=np.ones(rows, np.float32),
        min_p_S=np.zeros(rows, np.float32),
    )


def sample(
    logits_SV: jax.Array, choice: Choice, uniform_S: jax.Array, wanted_SV: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Tokens int32 [S] and their logprobs float32 [S] under the full untempered softmax of `logits_SV`.

    Temperature is applied first, then min-p, then top-k, then top-p to the remaining tokens. choice: each row's choice.
    uniform_S: each row's random number. wanted_SV: the logits to draw from; None: `logits_SV`.
    """
    tokens_S, logprobs_S, _ = _sample(logits_SV, choice, uniform_S, wanted_SV, supports=False)
    return tokens_S, logprobs_S


def sample_with_supports(
    logits_SV: jax.Array, choice: Choice, uniform_S: jax.Array, wanted_SV: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, SupportRows]:
    """The result of `sample`, and the tokens from which each row was drawn (all tokens without a filter)."""
    tokens_S, logprobs_S, supports = _sample(
        logits_SV, replace(choice, filters=True), uniform_S, wanted_SV, supports=True
    )
    assert supports is not None
    return tokens_S, logprobs_S, supports


def _sample(
    logits_SV: jax.Array, choice: Choice, uniform_S: jax.Array, wanted_SV: jax.Array | None, *, supports: bool
) -> tuple[jax.Array, jax.Array, SupportRows | None]:
    logits_SV = logits_SV.astype(jnp.float32)
    wanted_SV = logits_SV if wanted_SV is None else wanted_SV.astype(jnp.float32)
    top_S = jnp.max(logits_SV, axis=-1, keepdims=True)
    best_S = jnp.max(wanted_SV, axis=-1, keepdims=True)
    most_likely_S = jnp.argmax(wanted_SV, axis=-1).astype(jnp.int32)

    def weighted() -> jax.Array:
        temperature_S = jnp.where(choice.temperature_S > 0, choice.temperature_S, 1.0)
        # The maximum is subtracted before the division, because a tiny temperature must not cause inf - inf.
        weights_SV = jnp.exp((wanted_SV - best_S) / temperature_S[:, None])
        if choice.filters is None:
            weights_SV = jax.lax.cond(choice.any_filter, lambda w: filtered(w, choice), lambda w: w, weights_SV)
        elif choice.filters:
            weights_SV = filtered(weights_SV, choice)
        return weights_SV

    def drawn(weights_SV: jax.Array) -> jax.Array:
        total_S = _total(_fold(weights_SV))
        return jnp.where(choice.temperature_S > 0, invert(weights_SV, uniform_S * total_S), most_likely_S)

    weights_SV = None
    if choice.filters is None:
        tokens_S = jax.lax.cond(jnp.any(choice.temperature_S > 0), lambda: drawn(weighted()), lambda: most_likely_S)
    else:
        weights_SV = weighted()
        tokens_S = drawn(weights_SV)
    chosen_S = jnp.take_along_axis(logits_SV, tokens_S[:, None], axis=-1)[:, 0]
    spread_S = jnp.log(_total(_fold(jnp.exp(logits_SV - top_S))))
    rows = None
    if supports and weights_SV is not None:
        rows = _supports(weights_SV, choice, logits_SV - top_S, spread_S)
    return tokens_S, chosen_S - top_S[:, 0] - spread_S, rows


def _supports(weights_SV: jax.Array, choice: Choice, logits_SV: jax.Array, spread_S: jax.Array) -> SupportRows:
    """weights_SV: after the filters. logits_SV: minus their maximum. spread_S: their log-sum-exp."""
    fits_S = jnp.sum(weights_SV > 0, axis=-1) <= MOST_SUPPORTED
    restricted_S = choice.row_filters & (choice.temperature_S > 0) & fits_S
    kept_Ss, tokens_Ss = jax.lax.top_k(weights_SV, min(MOST_SUPPORTED, weights_SV.shape[1]))
    held_Ss = (kept_Ss > 0) & restricted_S[:, None]
    own_Ss = jnp.where(held_Ss, jnp.take_along_axis(logits_SV, tokens_Ss, axis=-1), -jnp.inf)
    log_mass_S = jnp.where(restricted_S, jax.nn.logsumexp(own_Ss, axis=-1) - spread_S, 0)
    padding = (0, 0), (0, MOST_SUPPORTED - tokens_Ss.shape[1])
    tokens_Ss = jnp.where(held_Ss, tokens_Ss.astype(jnp.int32), -1)
    return SupportRows(jnp.pad(tokens_Ss, padding, constant_values=-1), log_mass_S)


def filtered(weights_SV: jax.Array, choice: Choice) -> jax.Array:
    """Set weights to 0 below min_p, then outside the top k, then outside the smallest set with top_p of what remains.

    weights_SV: in [0, 1], 1 for the most likely token. Weights equal to the smallest kept weight are also kept.
    """
    k_S = jnp.where(choice.top_k_S >= 0, choice.top_k_S, 2**31 - 1)

    def enough_tokens(kept: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sum(kept.astype(jnp.int32), axis=1), axis=-1) >= k_S

    weights_Src = _fold(jnp.where(weights_SV >= choice.min_p_S[:, None], weights_SV, 0))
    weights_Src = _keep(weights_Src, _highest_threshold(weights_Src, enough_tokens))
    wanted_S = choice.top_p_S * _total(weights_Src)

    def enough_mass(kept: jax.Array) -> jax.Array:
        return _total(jnp.where(kept, weights_Src, 0)) >= wanted_S

    threshold_S = jnp.where(choice.top_p_S < 1, _highest_threshold(weights_Src, enough_mass), 0)
    S, V = weights_SV.shape
    return _keep(weights_Src, threshold_S).reshape(S, -1)[:, :V]


def invert(weights_SV: jax.Array, wanted_S: jax.Array) -> jax.Array:
    """The token whose share of the sum over tokens contains wanted_S, in [0, total): int32 [S], never of weight 0.

    Searches the columns of the folded weights, then within the column, so that running sums stay short.
    """
    if weights_SV.shape[1] <= _COLUMNS:
        return _crossing(weights_SV, wanted_S)[0]
    weights_Src = _fold(weights_SV)
    column_S, before_S = _crossing(jnp.sum(weights_Src, axis=1), wanted_S)
    rows_Sr = jnp.take_along_axis(weights_Src, column_S[:, None, None], axis=2)[:, :, 0]
    return invert(rows_Sr, wanted_S - before_S) * _COLUMNS + column_S


def _crossing(weights_Sn: jax.Array, wanted_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The first entry at which the running sum exceeds wanted_S, and the sum before it; never an entry of weight 0."""
    n = weights_Sn.shape[1]
    # A small matmul: jnp.cumsum becomes a dozen kernels, and costs more to compile than everything else here.
    sums_Sn = jnp.matmul(weights_Sn, jnp.triu(jnp.ones((n, n), jnp.float32)), precision=jax.lax.Precision.HIGHEST)
    place_Sn = jnp.arange(n, dtype=jnp.int32)
    beyond_Sn = (weights_Sn > 0) & (sums_Sn > wanted_S[:, None])
    # After rounding, the last sum may be slightly below wanted_S. Then the last entry with weight is right.
    last_S = jnp.max(jnp.where(weights_Sn > 0, place_Sn, 0), axis=-1)
    entry_S = jnp.minimum(jnp.min(jnp.where(beyond_Sn, place_Sn, n), axis=-1), last_S)
    before_S = jnp.take_along_axis(sums_Sn - weights_Sn, entry_S[:, None], axis=-1)[:, 0]
    return entry_S, before_S


def _fold(weights_SV: jax.Array) -> jax.Array:
    """[S, V] -> [S, r, c], padded with zeros, because sums over r vectorize but a sum over V does not."""
    S, V = weights_SV.shape
    return jnp.pad(weights_SV, ((0, 0), (0, -V % _COLUMNS))).reshape(S, -1, _COLUMNS)


def _total(weights_Src: jax.Array) -> jax.Array:
    return jnp.sum(jnp.sum(weights_Src, axis=1), axis=-1)


def _keep(weights_Src: jax.Array, threshold_S: jax.Array) -> jax.Array:
    return jnp.where(_bits(weights_Src) >= threshold_S[:, None, None], weights_Src, 0)


def _bits(weights: jax.Array) -> jax.Array:
    """Nonnegative floats as int32, in the same order."""
    return jax.lax.bitcast_convert_type(weights, jnp.int32)


def _highest_threshold(weights_Src: jax.Array, enough: Callable[[jax.Array], jax.Array]) -> jax.Array:
    """The bits of the highest threshold at which enough(weights >= threshold), by row; 0 if there is none."""
    bits_Src = _bits(weights_Src)

    def refine(step: jax.Array, bits_S: jax.Array) -> jax.Array:
        trial_S = bits_S | (jnp.int32(1) << (_ONE_BITS - 1 - step))
        return jnp.where(enough(bits_Src >= trial_S[:, None, None]), trial_S, bits_S)

    return jax.lax.fori_loop(0, _ONE_BITS, refine, jnp.zeros(weights_Src.shape[0], jnp.int32))
