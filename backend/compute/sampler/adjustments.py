"""Adjustment of logits before a token is drawn: biases, penalties, and the tokens that a constraint allows.

The bias is applied first, then the repetition, frequency and presence penalties, as in vLLM's V1 sampler
(`vllm/v1/sample/sampler.py`). Tokens that a constraint does not allow are never drawn. The frequency and presence
penalties follow OpenAI's API, and count the generated tokens. The repetition penalty follows CTRL (Keskar et al., arXiv
1909.05858, section 4.1), as in vLLM and Hugging Face, and counts the prompt and the generated tokens. Reported logprobs
come from the unadjusted logits.

A batch without adjustments has no tables, and its program skips all adjustments.

Letters: S slots, V vocabulary, W words of 32 bits, N entries of a table.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh

from tinkerflow.backend.compute.mesh import Array, by_rows
from tinkerflow.backend.compute.sampler.constraints import everything
from tinkerflow.backend.compute.sampler.requests import RowAssignment
from tinkerflow.backend.compute.warming import result_of

_ENTRIES = 4096  # of a table, per dispatch
_PROMPT, _GENERATED = 1, 2  # added to `seen_SV` for each token; an odd number: the prompt also contains the token


@flax.struct.dataclass
class AdjustedRows:
    """The adjustments of each row's logits. A row without adjustments has penalties of 0, 0 and 1, and tables of zeros.

    presence_S, frequency_S, repetition_S float32: the penalties. seen_SV int32: twice the number of times that the row
    has generated the token, plus 1 if the prompt contains it. bias_SV float32: added to the logits. allowed_SW uint32:
    a bit for each token; 1: the token may be drawn.
    """

    presence_S: Array
    frequency_S: Array
    repetition_S: Array
    seen_SV: Array
    bias_SV: Array
    allowed_SW: Array


def adjusted(logits_SV: jax.Array, rows: AdjustedRows) -> jax.Array:
    """The logits float32 [S, V] to draw from. The logits of a row without adjustments are unchanged, bit for bit."""
    seen_SV = rows.seen_SV
    logits_SV = logits_SV + rows.bias_SV
    repetition_SV = jnp.where(seen_SV > 0, rows.repetition_S[:, None], 1)
    logits_SV = jnp.where(logits_SV > 0, logits_SV / repetition_SV, logits_SV * repetition_SV)
    count_SV = seen_SV // _GENERATED
    logits_SV = logits_SV - rows.frequency_S[:, None] * count_SV.astype(jnp.float32)
    logits_SV = logits_SV - jnp.where(count_SV > 0, rows.presence_S[:, None], 0)
    bits_SWb = jnp.asarray(rows.allowed_SW)[:, :, None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    S, V = logits_SV.shape
    return jnp.where(bits_SWb.reshape(S, -1)[:, :V] > 0, logits_SV, -jnp.inf)


def generated(rows: AdjustedRows, tokens_S: jax.Array) -> AdjustedRows:
    """The rows after each row has generated its token of tokens_S."""
    place_S = jnp.arange(tokens_S.shape[0])
    return replace(rows, seen_SV=jnp.asarray(rows.seen_SV).at[place_S, tokens_S].add(_GENERATED))


def adjusted_rows(mesh: Mesh, vocab: int, S: int, assigned: RowAssignment) -> AdjustedRows | None:
    """The adjustments of the sequences in their slots; None if no sequence has adjustments.

    mesh: the devices of the tables. vocab: V. S: slots.
    """
    adjusting = [(slot, each, wishes) for slot, each in assigned if (wishes := each.parent.request.adjustments)]
    matchers = [(slot, each.matcher) for slot, each in assigned if each.matcher is not None]
    if not adjusting and not matchers:
        return None
    allowed_SW = everything(S, vocab)
    for slot, matcher in matchers:
        allowed_SW[slot] = matcher.allowed
    presence_S, frequency_S = np.zeros(S, np.float32), np.zeros(S, np.float32)
    repetition_S = np.ones(S, np.float32)
    rows: list[npt.NDArray[np.int32]] = []
    tokens: list[npt.NDArray[np.int32]] = []
    seen: list[npt.NDArray[np.int32]] = []
    biases: list[npt.NDArray[np.float32]] = []

    def enter(slot: int, these: npt.NDArray[np.int32], counted: int, bias: npt.NDArray[np.float32] | float) -> None:
        rows.append(np.full(len(these), slot, np.int32))
        tokens.append(these)
        seen.append(np.full(len(these), counted, np.int32))
        biases.append(np.broadcast_to(np.float32(bias), these.shape))

    for slot, sequence, wishes in adjusting:
        presence_S[slot], frequency_S[slot] = wishes.presence, wishes.frequency
        repetition_S[slot] = wishes.repetition
        if wishes.repetition != 1:
            enter(slot, sequence.parent.prompt_tokens, _PROMPT, 0.0)
        if wishes.penalizes:
            enter(slot, np.asarray(sequence.tokens, np.int32), _GENERATED, 0.0)
        if wishes.bias:
            names, values = zip(*wishes.bias, strict=True)
            enter(slot, np.asarray(names, np.int32), 0, np.asarray(values, np.float32))
    seen_SV, bias_SV = empty_tables(mesh, S, vocab)
    whole = [np.concatenate(parts) for parts in (rows, tokens, seen, biases) if parts]
    for start in range(0, len(whole[0]) if whole else 0, _ENTRIES):
        seen_SV, bias_SV = entered(mesh, seen_SV, bias_SV, *(_padded(part[start : start + _ENTRIES]) for part in whole))
    return AdjustedRows(presence_S, frequency_S, repetition_S, seen_SV, bias_SV, allowed_SW)


@partial(jax.jit, static_argnums=(0, 1, 2))
def empty_tables(mesh: Mesh, S: int, vocab: int) -> tuple[jax.Array, jax.Array]:
    """`seen_SV` and `bias_SV` of zeros, with their rows split like those of the logits."""
    return by_rows(mesh, jnp.zeros((S, vocab), jnp.int32)), by_rows(mesh, jnp.zeros((S, vocab), jnp.float32))


@partial(jax.jit, static_argnums=0, donate_argnums=(1, 2))
def entered(
    mesh: Mesh,
    seen_SV: jax.Array,
    bias_SV: jax.Array,
    rows_N: Array,
    tokens_N: Array,
    seen_N: Array,
    bias_N: Array,
) -> tuple[jax.Array, jax.Array]:
    """Add entries to the tables in place.

    mesh: the devices of the tables. rows_N, tokens_N int32: the places. seen_N int32, bias_N float32: the amounts.
    """
    seen_SV = seen_SV.at[rows_N, tokens_N].add(seen_N)
    return by_rows(mesh, seen_SV), by_rows(mesh, bias_SV.at[rows_N, tokens_N].add(bias_N))


def warm_rows(mesh: Mesh, S: int, vocab: int) -> AdjustedRows:
    """Rows without values, for compiling the programs. mesh, S, vocab: see `adjusted_rows`."""
    entries, biases = np.zeros(_ENTRIES, np.int32), np.zeros(_ENTRIES, np.float32)
    tables = result_of(empty_tables, mesh, S, vocab)
    seen_SV, bias_SV = result_of(entered, mesh, *tables, entries, entries, entries, biases)
    numbers_S = np.zeros(S, np.float32)
    return AdjustedRows(numbers_S, numbers_S, numbers_S, seen_SV, bias_SV, everything(S, vocab))


def _padded(entries: npt.NDArray[np.generic]) -> npt.NDArray[np.generic]:
    """Pad entries with zeros, which add nothing to token 0 of row 0."""
    return np.pad(entries, (0, _ENTRIES - len(entries)))
