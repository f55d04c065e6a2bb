"""The decode batch: the KV cache of all slots, its size, and the chunks that are decoded in it."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.compute.sampler.decode import Decoded
from tinkerflow.backend.compute.sampler.kv_cache import KVCache, SlotCopy, pages_for
from tinkerflow.backend.compute.sampler.model import Held, SamplerModel
from tinkerflow.backend.compute.sampler.scheduler import PrefillGroup, Scheduler
from tinkerflow.backend.compute.sampler.shapes import Shapes

_CALM_STEPS = 4  # the cache shrinks only after so many steps that a smaller one would have done for: no to and fro


class DecodeBatch:
    """The cache of the sequences that the scheduler has given slots. It grows when it must, and shrinks when calm."""

    def __init__(self, model: SamplerModel, scheduler: Scheduler, shapes: Shapes) -> None:
        """No cache yet."""
        self._model, self._scheduler, self._shapes = model, scheduler, shapes
        self.cache: KVCache | None = None
        self._calm = 0  # steps in a row for which a smaller cache would have done

    @property
    def slots(self) -> int:
        """How many sequences the cache has room for; 0 without a cache."""
        return self.cache.slots if self.cache is not None else 0

    @property
    def length(self) -> int:
        """How many positions each slot has; 0 without a cache."""
        return self.cache.length if self.cache is not None else 0

    def clear(self) -> None:
        """Let go of the cache."""
        self.cache, self._calm = None, 0

    def take_in(self, group: PrefillGroup, staged: KVCache) -> None:
        """Give slots to sequences of a prefilled group, as many as are free, and copy their prompts there."""
        length = max(self.length, self._shapes.length_for(max(job.length for job in group.jobs) + 1))
        most = self._shapes.most_slots(length)
        if self._scheduler.busy >= most:
            return
        self._resize(min(max(self._shapes.slots_for(self._scheduler.wanted_slots()), self.slots), most), length)
        assigned = self._scheduler.assign_slots(length)
        copies = [SlotCopy(each.row, each.slot, pages_for(group.jobs[each.row].length)) for each in assigned]
        assert self.cache is not None
        self.cache = self._model.copy_slots(self.cache, staged, copies)

    def decode(self) -> tuple[Held, int, Decoded]:
        """One chunk of every sequence: the sequences by slot, how many tokens, and what was decoded, on the host.

        Slots in which something is not finite are zeroed. There must be a sequence.
        """
        steps = self._steps()
        self._fit(steps)
        self._model.snapshots.use(self._scheduler.snapshots())  # prefill may have given their columns to others
        assert self.cache is not None
        held = list(self._scheduler.decoding())
        self.cache, decoded = self._model.decode_chunk(self.cache, held, steps)
        self.zero(np.asarray(~np.isfinite(decoded.logprobs_CS).all(axis=0)))
        return held, steps, decoded

    def zero(self, dirty_S: npt.NDArray[np.bool_]) -> None:
        """Zero the slots in which something is not finite, or may be: so it cannot reach the next sequence there."""
        if dirty_S.any() and self.cache is not None:
            self.cache = self._model.zero_slots(self.cache, dirty_S)

    def _steps(self) -> int:
        """How many tokens to decode: up to where the first sequence reaches its limit, but half a chunk to a whole."""
        remaining, chunk = [sequence.remaining for _, sequence in self._scheduler.decoding()], self._model.chunk
        return min(chunk, max(remaining), max(min(remaining), -(-chunk // 2)))

    def _fit(self, steps: int) -> None:
        """Make room for `steps` more tokens of every sequence: a longer cache, maybe with fewer slots.

        A smaller cache once it is calm: for some steps fewer slots would have done, or a shorter cache would have had
        room for more sequences that wait.
        """
        need = self._positions(steps)
        length = max(self.length, self._shapes.length_for(need))
        most = self._shapes.most_slots(length)
        if length > self.length:
            self._scheduler.preempt(most)
            need = self._positions(steps)
            length = max(self.length, self._shapes.length_for(need))
        wanted, short = self._shapes.slots_for(self._scheduler.wanted_slots()), self._shapes.length_for(need)
        slots, in_short = (min(wanted, self._shapes.most_slots(each)) for each in (length, short))
        self._calm = self._calm + 1 if slots < self.slots or slots < in_short else 0
        if self._calm >= _CALM_STEPS:
            self._calm = 0
            self._resize(in_short, short)
        else:
            self._resize(min(self.slots, self._shapes.most_slots(length)), length)

    def _positions(self, steps: int) -> int:
        """Positions that the longest sequence takes after `steps` more tokens."""
        return max(each.cached + min(steps, each.remaining) for _, each in self._scheduler.decoding())

    def _resize(self, slots: int, length: int) -> None:
        if (slots, length) == (self.slots, self.length):
            return
        old, from_S = self.cache, self._scheduler.resize(slots)
        self.cache = self._model.empty_cache(slots, length)
        if old is not None:
            sequences = self._scheduler.decoding()
            copies = [SlotCopy(from_S[slot], slot, pages_for(each.cached)) for slot, each in sequences]
            self.cache = self._model.copy_slots(self.cache, old, copies)
