"""How large the decode batch's cache is, and what is copied when that changes: with a model that only counts."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from tinkerflow.backend.compute.sampler.decode import Decoded
from tinkerflow.backend.compute.sampler.decode_batch import DecodeBatch
from tinkerflow.backend.compute.sampler.kv_cache import SlotCopy
from tinkerflow.backend.compute.sampler.requests import ActiveSequence, ParentRequest
from tinkerflow.backend.compute.sampler.sampling import UniformStream
from tinkerflow.backend.compute.sampler.scheduler import Scheduler
from tinkerflow.backend.compute.sampler.shapes import make_shapes
from tinkerflow.backend.compute.sampler.stops import StopDetector


@dataclass
class Size:
    """A cache, as far as sizes go."""

    slots: int
    length: int


@dataclass
class CountingModel:
    """Copies and zeroed slots are written down; every token is 1, and those of `broken` slots are not finite."""

    chunk: int = 8
    broken: tuple[int, ...] = ()
    copies: list[SlotCopy] = field(default_factory=list)
    zeroed: list[int] = field(default_factory=list)

    @property
    def snapshots(self) -> Any:
        return self

    def use(self, wanted: Any) -> None:
        assert list(wanted) == []

    def empty_cache(self, slots: int, length: int) -> Size:
        return Size(slots, length)

    def copy_slots(self, into: Size, source: Any, copies: list[SlotCopy]) -> Size:
        self.copies += copies
        return into

    def zero_slots(self, cache: Size, dirty_S: Any) -> Size:
        self.zeroed += np.flatnonzero(dirty_S).tolist()
        return cache

    def decode_chunk(self, cache: Size, held: Any, steps: int) -> tuple[Size, Decoded]:
        logprobs_CS = np.zeros((self.chunk, cache.slots), np.float32)
        logprobs_CS[:, list(self.broken)] = np.nan
        return cache, Decoded(np.ones((self.chunk, cache.slots), np.int32), logprobs_CS)


@pytest.fixture
def model() -> CountingModel:
    return CountingModel()


@pytest.fixture
def batch(model: CountingModel) -> tuple[DecodeBatch, Scheduler]:
    shapes = make_shapes(max_slots=16, max_context=2000, fsdp=1, most_cells=4 * 512)
    scheduler = Scheduler(shapes, max_slots=16)
    return DecodeBatch(model, scheduler, shapes), scheduler  # type: ignore[arg-type]


@pytest.fixture
def join(batch: tuple[DecodeBatch, Scheduler], ask: Any) -> Any:
    """join(id, prompt length, samples, limit): a request that is prefilled, and takes slots."""

    def make(request_id: str, length: int = 5, samples: int = 1, limit: int = 400) -> None:
        request = ask(request_id, range(length), limit, num_samples=samples)
        parent = ParentRequest(request, None, limit)
        stops = StopDetector(frozenset(), (), None)
        batch[1].admit(parent, [ActiveSequence(parent, i, stops, UniformStream(0, i)) for i in range(samples)])
        group = batch[1].next_group(batch[0].length)
        assert group is not None
        group.begin(0)
        while group.remaining > 0:
            group.advance(group.piece, None)
        batch[0].take_in(group, Size(1, 512))  # type: ignore[arg-type]

    return make


def go_on(batch: DecodeBatch) -> int:
    held, steps, _ = batch.decode()
    for _, sequence in held:
        sequence.take([1] * steps, [0.0] * steps)
    return steps


def test_a_prompt_is_copied_to_each_slot_by_pages(batch: Any, model: CountingModel, join: Any) -> None:
    join("a", length=200, samples=2)
    assert (batch[0].slots, batch[0].length) == (4, 512)
    assert model.copies == [SlotCopy(0, 0, 2), SlotCopy(0, 1, 2)]


def test_the_cache_grows_with_the_longest_and_has_fewer_slots_then(batch: Any, model: CountingModel, join: Any) -> None:
    for number in range(5):
        join(f"r{number}", limit=1000)
    assert (batch[0].slots, batch[0].length) == (16, 128)
    sequences = [sequence for _, sequence in batch[1].decoding()]
    model.copies.clear()
    for _ in range(16):
        go_on(batch[0])
    assert (batch[0].slots, batch[0].length) == (4, 512)
    assert [sequence for _, sequence in batch[1].decoding()] == sequences[:4], "the youngest waits again"
    assert [(copy.source, copy.into) for copy in model.copies] == [(0, 0), (1, 1), (2, 2), (3, 3)]


def test_it_shrinks_after_some_calm_steps(batch: Any, join: Any) -> None:
    join("a", samples=4)
    join("b")
    assert batch[0].slots == 16
    batch[1].remove("a")
    sizes = []
    for _ in range(5):
        go_on(batch[0])
        sizes.append(batch[0].slots)
    assert sizes == [16, 16, 16, 1, 1]


def test_slots_with_what_is_not_finite_are_zeroed(batch: Any, model: CountingModel, join: Any) -> None:
    join("a", samples=3)
    model.broken = (1,)
    batch[0].decode()
    assert model.zeroed == [1]


def test_a_chunk_ends_at_the_first_limit_but_not_before_its_half(batch: Any, join: Any) -> None:
    join("a", limit=2)
    join("b", limit=30)
    assert go_on(batch[0]) == 4
