"""The prefix cache: pages of prompts that outlive their requests, for later prompts that begin with the same tokens.

A page is BLOCK positions of a staged cache. Its key is everything that decided its numbers: the requests that may share
it, every token up to its end, and the pieces in which these tokens were computed. So a page from the cache is bit for
bit what would have been computed, and the rest of the prompt is computed in the pieces it would have been computed in:
a result does not depend on what is cached. Prompts that are prefilled together do not use the cache, because their
compiled shape depends on each other. Decoded tokens are not cached.

Which pages are kept follows from the commands alone, so every process of a group keeps the same ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import accumulate, pairwise, takewhile

import numpy as np
from jax.sharding import Mesh

from tinkerflow.backend.commands import Int32
from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.sampler.kv_cache import KVCache, page_of, with_page
from tinkerflow.backend.compute.sampler.requests import PrefixScope
from tinkerflow.backend.compute.sampler.scheduler import PrefillGroup, PrefillJob
from tinkerflow.backend.compute.sampler.shapes import BLOCK, prefill_pieces


class PrefixCache:
    """The pages, least recently used first. At most `most` of them; with 0 nothing is kept."""

    def __init__(self, cfg: ModelConfig, mesh: Mesh, most: int) -> None:
        """Nothing kept yet."""
        self._cfg, self._mesh, self._most = cfg, mesh, most
        self._pages: dict[tuple[PrefixScope, bytes], KVCache] = {}

    def __len__(self) -> int:
        """How many pages there are."""
        return len(self._pages)

    def fill(self, group: PrefillGroup, staged: KVCache) -> tuple[KVCache, int]:
        """`staged`, updated in place, with the cached pages of a group's only prompt, and how many tokens they hold.

        That number is a border of the prompt's own pieces, and comes before the first token whose scores are wanted.
        """
        if (scope := group.scope) is None:
            return staged, 0
        (job,), borders = group.jobs, _borders(group)
        keys = _keys(scope, job, borders)
        held = sum(1 for _ in takewhile(self._pages.__contains__, keys))
        covered = job.length if held == len(keys) else held * BLOCK
        ends = [min(border, job.length) for border in borders]
        known = max(end for end in ends if end <= covered and not job.wants(0, end))
        for page, key in enumerate(keys[: -(-known // BLOCK)]):
            staged = with_page(self._cfg, self._mesh, staged, self._pages[key], np.int32(page))
        return staged, known

    def keep(self, group: PrefillGroup, staged: KVCache) -> None:
        """Keep the computed prompt of a group that has only one; the least recently used pages make room."""
        if (scope := group.scope) is None:
            return
        keys = _keys(scope, group.jobs[0], _borders(group))[: self._most]
        for page, key in reversed(tuple(enumerate(keys))):  # a page is of no use without those before it: they go last
            held = self._pages.pop(key, None)
            self._pages[key] = page_of(self._cfg, self._mesh, staged, np.int32(page)) if held is None else held
            if len(self._pages) > self._most:
                del self._pages[next(iter(self._pages))]

    def forget(self, gone: Callable[[PrefixScope], bool]) -> None:
        """Drop every page of a scope for which `gone` is true."""
        self._pages = {key: page for key, page in self._pages.items() if not gone(key[0])}

    def clear(self) -> None:
        """Drop everything."""
        self._pages.clear()


def _borders(group: PrefillGroup) -> list[int]:
    """Where the pieces of the group's only prompt begin and end: from 0 to its length, or a little beyond."""
    return [0, *accumulate(prefill_pieces(group.jobs[0].length, group.length))]


def _keys(scope: PrefixScope, job: PrefillJob, borders: Sequence[int]) -> list[tuple[PrefixScope, bytes]]:
    """The keys of a prompt's pages: each a digest of the page before, its own tokens, and their pieces."""
    tokens_T: Int32 = job.tokens_T[: job.length]
    keys, digest = [], b""
    for begin in range(0, job.length, BLOCK):
        pieces = [(start, end) for start, end in pairwise(borders) if start < begin + BLOCK and end > begin]
        own = repr(pieces).encode() + tokens_T[begin : begin + BLOCK].tobytes()
        digest = hashlib.sha256(digest + own).digest()
        keys.append((scope, digest))
    return keys
