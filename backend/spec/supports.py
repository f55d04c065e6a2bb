"""Supports: the tokens that top-k, top-p and min-p kept as candidates at each position of a sample.

The sampler and the trainer compute log probabilities under the full softmax, but such a sample's tokens were drawn from
the softmax over their supports. The ratio of two policies that drew from supports is

    new(token) / new(support) * old(support) / old(token),

where old(support) was recorded with the sample, and new(support) is computed in training ("keep sampling mask",
DeepSeek-AI, "DeepSeek-V3.2", arXiv 2512.02556, section 3.1).

Letters: N positions, T positions of an example, M tokens of all supports, s tokens of a support, K targets.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

MOST_SUPPORTED = 256  # tokens of a recorded support; a larger one is not recorded

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Supports:
    """The supports of N positions, one after another.

    counts_N int32: the number of tokens of each; 0 = the whole vocabulary, or too many to be recorded. tokens_M int32:
    their ids. log_mass_N float32: the log of their probability under the full untempered softmax, 0 without ids.
    """

    counts_N: Int32
    tokens_M: Int32
    log_mass_N: Float32

    @classmethod
    def of(cls, tokens_Ns: Int32, log_mass_N: Float32) -> Supports:
        """The supports in rows of ids, which are padded with -1."""
        held_Ns = tokens_Ns >= 0
        return cls(held_Ns.sum(axis=1, dtype=np.int32), tokens_Ns[held_Ns], log_mass_N)

    @classmethod
    def unrestricted(cls, count: int) -> Supports:
        """The whole vocabulary at `count` positions."""
        return cls(np.zeros(count, np.int32), np.zeros(0, np.int32), np.zeros(count, np.float32))

    @classmethod
    def joined(cls, parts: Iterable[Supports]) -> Supports:
        """The positions of all parts in order. There is at least one part."""
        columns = zip(*((part.counts_N, part.tokens_M, part.log_mass_N) for part in parts), strict=True)
        return cls(*(np.concatenate(column) for column in columns))

    def part(self, start: int, stop: int) -> Supports:
        """Positions [start, stop)."""
        first, here = int(self.counts_N[:start].sum()), self.counts_N[start:stop]
        return Supports(here, self.tokens_M[first : first + int(here.sum())], self.log_mass_N[start:stop])

    def rows(self) -> Int32:
        """The ids as rows [N, MOST_SUPPORTED], padded with -1."""
        tokens_Ns = np.full((len(self.counts_N), MOST_SUPPORTED), -1, np.int32)
        tokens_Ns[np.arange(MOST_SUPPORTED) < self.counts_N[:, None]] = self.tokens_M
        return tokens_Ns


def equal_supports(one: Supports | None, other: Supports | None, most: int) -> int:
    """How many of the first `most` positions have equal supports. None: the whole vocabulary at all positions."""
    one, other = one or Supports.unrestricted(most), other or Supports.unrestricted(most)
    differing = np.flatnonzero(one.counts_N[:most] != other.counts_N[:most])
    equal = int(differing[0]) if len(differing) else most
    ends_N = np.cumsum(one.counts_N[:equal])
    tokens = int(ends_N[-1]) if equal else 0
    differing = np.flatnonzero(one.tokens_M[:tokens] != other.tokens_M[:tokens])
    return int(np.searchsorted(ends_N, differing[0], side="right")) if len(differing) else equal


def restricted_inputs(inputs: Mapping[str, npt.NDArray[Any]], supports: Supports | None) -> Mapping[str, Any]:
    """The inputs of a loss, [T, K] by name, with the sampler's `logprobs` under the softmax over the supports."""
    if supports is None or "logprobs" not in inputs:
        return inputs
    return {**inputs, "logprobs": inputs["logprobs"] - supports.log_mass_N[:, None]}
