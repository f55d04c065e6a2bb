"""The prompts in prefill, and the cache of their own in which they are staged until their sequences have slots."""

from __future__ import annotations

from tinkerflow.backend.compute.sampler.kv_cache import KVCache
from tinkerflow.backend.compute.sampler.model import SamplerModel
from tinkerflow.backend.compute.sampler.prefix_cache import PrefixCache
from tinkerflow.backend.compute.sampler.requests import PrefixScope
from tinkerflow.backend.compute.sampler.scheduler import PrefillGroup


class PromptStage:
    """One group's staged cache. A prompt begins with what the prefix cache holds of it, and ends there too."""

    def __init__(self, model: SamplerModel, prefix_cache: PrefixCache) -> None:
        """Nothing staged."""
        self._model, self._prefix_cache = model, prefix_cache
        self.cache: KVCache | None = None
        self._group: PrefillGroup | None = None  # whose cache it is
        self._scope: PrefixScope | None = None  # the weights and owner the group began with; None once it is kept

    def compute(self, group: PrefillGroup, budget: int) -> int:
        """Compute pieces of the group's prompts, until all are done or `budget` tokens are spent. Tokens spent, padded.

        The snapshots that the group uses must be in the stack (`SnapshotCache.use`).
        """
        if self._group is not group or self.cache is None:
            self._group, self._scope = group, group.scope
            empty = self._model.empty_cache(group.rows, group.length)
            self.cache, known = self._prefix_cache.fill(group, empty)
            group.begin(known)
        spent = 0
        while group.remaining > 0 and spent < budget:
            spent += group.rows * group.piece
            self.cache = self._model.prefill_piece(group, self.cache)
        return spent

    def keep_prefix(self, group: PrefillGroup) -> None:
        """Let later requests begin with the group's prompt, if all of it was computed with weights that they have."""
        scope, self._scope = self._scope, None
        if scope is None or scope != group.scope or not self._model.snapshots.alive(scope.snapshot):
            return
        assert self.cache is not None
        self._prefix_cache.keep(group, self.cache)

    def clear(self) -> None:
        """Let go of the cache."""
        self.cache = self._group = self._scope = None
