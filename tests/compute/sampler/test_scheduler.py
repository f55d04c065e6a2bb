"""The scheduler's state on the host, without device arrays."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from tests.compute.conftest import ask

from tinkerflow.backend.compute.platforms import CUDA
from tinkerflow.backend.compute.sampler.pages import PagePool
from tinkerflow.backend.compute.sampler.prompt_scores import PieceScores, prompt_scores
from tinkerflow.backend.compute.sampler.requests import ActiveRequest, ActiveSequence, PrefixScope
from tinkerflow.backend.compute.sampler.sampling import UniformStream
from tinkerflow.backend.compute.sampler.scheduler import Scheduler
from tinkerflow.backend.compute.sampler.shapes import make_shapes
from tinkerflow.backend.compute.sampler.stops import StopDetector
from tinkerflow.backend.spec.commands import PromptWishes, SampleRequest, SampleResult

SHAPES = make_shapes(max_slots=16, fsdp=1)
STOP = 99


@pytest.fixture
def pool() -> PagePool:
    return PagePool(100)


@pytest.fixture
def line(pool: PagePool) -> Scheduler:
    return Scheduler(SHAPES, 10, pool)


def admit_into(line: Scheduler, request: SampleRequest) -> list[ActiveSequence]:
    """Queue a request that stops at the token STOP. Returns its sequences."""
    parent = ActiveRequest(request, None, request.max_tokens, scores=prompt_scores(request, vocab=320))
    sequences = [
        ActiveSequence(parent, index, StopDetector(frozenset({STOP}), (), None), UniformStream(0, index))
        for index in range(request.num_samples)
    ]
    line.admit(parent, sequences)
    return sequences


@pytest.fixture
def admit(line: Scheduler) -> Callable[..., list[ActiveSequence]]:
    """admit(id, length, samples, limit, ...): queue a request with a prompt of this length."""

    def make(request_id: str, length: int = 5, samples: int = 1, limit: int = 4, **changes: Any) -> Any:
        return admit_into(line, ask(request_id, range(length), limit, num_samples=samples, **changes))

    return make


def advance(line: Scheduler) -> list[ActiveSequence]:
    """Prefill all of the next group, and let its sequences join. Returns the sequences that joined."""
    group, before = line.next_group(), len(line.slots.sequences)
    assert group is not None
    while group.remaining > 0:
        group.advance(group.piece, None)
    line.start_group(lambda scope: True)
    return line.slots.sequences[before:]


def test_short_prompts_go_together_and_long_ones_alone(line: Scheduler, admit: Any) -> None:
    for request_id, length in (("a", 5), ("b", 100), ("c", 300), ("d", 5)):
        admit(request_id, length)
    groups = []
    while group := line.next_group():
        groups.append([job.parent.id for job in group.jobs])
        advance(line)
    assert groups == [["a", "b"], ["c"], ["d"]]


def served(line: Scheduler) -> list[str]:
    """The order in which requests are prefilled and get a slot. Each slot is freed immediately."""
    names = []
    while (group := line.next_group()) is not None:
        names += [job.parent.id for job in group.jobs]
        for sequence in advance(line):
            line.slots.remove(sequence)
    return names


def test_owners_share_and_requests_of_one_owner_keep_their_order(line: Scheduler, admit: Any) -> None:
    for number in range(6):
        admit(f"a{number}", 300, owner="a")
    first = line.next_group()
    assert first is not None and first.jobs[0].parent.id == "a0"
    for number in range(2):
        admit(f"b{number}", 300, owner="b")
    admit("c0", 300, samples=3, owner="c")
    admit("c1", 300, owner="c")
    advance(line)
    assert served(line) == ["b0", "c0", "a1", "b1", "a2", "a3", "c1", "a4", "a5"]


def test_interactive_requests_precede_only_their_own_batch(line: Scheduler, admit: Any) -> None:
    for number in range(4):
        admit(f"a{number}", 300, owner="a", priority="batch")
        admit(f"b{number}", 300, owner="b")
    assert advance(line)[0].parent.id == "a0"
    admit("a4", 300, owner="a")
    admit("a5", 300, owner="a", samples=2)
    admit("a6", 300, owner="a", priority="batch")
    admit("a7", 300, owner="a")
    admit("b4", 300, owner="b", priority="batch")
    line.slots.remove(line.slots.sequences[0])
    names = served(line)
    assert [name for name in names if name[0] == "a"] == ["a4", "a5", "a7", "a1", "a2", "a3", "a6"]
    assert [name for name in names if name[0] == "b"] == ["b0", "b1", "b2", "b3", "b4"]
    # The shares are unchanged: after the first of a, 4 sequences of each are served.
    assert names.index("b3") <= names.index("a7") + 1


def test_batch_request_is_not_overtaken_forever(line: Scheduler, admit: Any) -> None:
    admit("batch", 300, owner="a", priority="batch")
    for number in range(300):
        admit(f"i{number}", 300, owner="a")
    order = [job.parent.id for job in line.waiting_jobs]
    assert order.index("batch") == 256
    assert order[:256] + order[257:] == [f"i{number}" for number in range(300)]


def test_preempted_request_is_not_overtaken(line: Scheduler, admit: Any) -> None:
    (sequence,) = admit("batch", 5, owner="a", priority="batch")
    advance(line)
    line.slots.remove(sequence)
    line._requeue(sequence)
    admit("interactive", 5, owner="a")
    assert [job.parent.id for job in line.waiting_jobs] == ["batch", "interactive"]


def test_cancelled_request_is_not_charged(line: Scheduler, admit: Any) -> None:
    admit("b0", 300, owner="b")
    for number in range(5):
        admit(f"a{number}", 300, owner="a")
    for number in range(1, 5):
        line.remove_request(f"a{number}")
    admit("b1", 300, owner="b")
    admit("a5", 300, owner="a")
    admit("a6", 300, owner="a")
    admit("b2", 300, owner="b")
    assert served(line) == ["b0", "a0", "b1", "a5", "a6", "b2"]


def test_samples_of_one_request_share_a_row(line: Scheduler, admit: Any) -> None:
    many, few = admit("a", samples=3), admit("b", samples=2)
    assert advance(line) == [*many, *few]
    pages = {tuple(sequence.table.pages) for sequence in line.slots.sequences}
    assert len(pages) == 2 and all(len(table) == 1 for table in pages)
    assert (line.active, line.waiting, line.slots.busy) == (2, 0, 5)
    assert line.slots.assign(line.slots.sequences) == (16, list(enumerate(line.slots.sequences)))


def test_a_group_waits_staged_until_every_sample_had_a_slot(line: Scheduler, admit: Any) -> None:
    first = admit("first", samples=3)
    advance(line)
    sequences = admit("a", samples=10)
    admit("b")
    assert len(advance(line)) == 7  # max_slots is 10, although 16 exist
    assert line.group is not None and line.next_group() is line.group
    for ended, joined in ((first[:2], (7, 8)), (sequences[:1], (9,))):
        for sequence in ended:
            line.slots.remove(sequence)
        assert advance(line)[-len(joined) :] == [sequences[index] for index in joined]
    assert line.group is None


def test_more_samples_than_slots_let_other_projects_in_between(line: Scheduler, admit: Any) -> None:
    many, few = admit("a", samples=25, owner="x"), admit("b", owner="y")
    assert advance(line) == many[:10]
    for sequence in many[:10]:
        line.slots.remove(sequence)
    assert advance(line) == [*few, *many[10:19]]


def test_prompt_is_prefilled_only_with_a_free_slot(line: Scheduler, admit: Any) -> None:
    admit("a", samples=10)
    admit("b")
    advance(line)
    assert line.next_group() is None
    assert (line.active, line.waiting) == (1, 1)


def test_sequence_ends_by_a_stop_or_its_length(admit: Any, line: Scheduler) -> None:
    stopped, full = admit("a", samples=2, limit=3)
    assert not stopped.append([7], [-0.5])
    assert stopped.append([STOP, 8], [-0.25, -1.0])
    assert full.append([STOP - 1, 2, STOP], [0.0, 0.0, 0.0])
    (result,) = line.pop_finished()
    assert [s.tokens_T.tolist() for s in result.sequences] == [[7, STOP], [STOP - 1, 2, STOP]]
    assert [s.stop_reason for s in result.sequences] == ["stop", "stop"]
    (alone,) = admit("b", limit=2)
    assert alone.append([1, 2, 3], [0.0, 0.0, 0.0])
    (result,) = line.pop_finished()
    assert result.sequences[0].stop_reason == "length"
    assert result.sequences[0].tokens_T.tolist() == [1, 2]
    assert not line.has_request("b")


def test_removing_frees_slots_queue_group_and_pages(line: Scheduler, admit: Any, pool: PagePool) -> None:
    admit("a", samples=2)
    advance(line)
    admit("b")
    admit("c")
    group = line.next_group()
    admit("d")
    for request_id in ("a", "b", "d", "unknown"):
        line.remove_request(request_id)
    assert line.slots.busy == 0 and line.group is group  # c is still in the group
    assert group is not None and [(job.row, len(job.table.pages)) for job in group.jobs] == [(0, 0), (1, 1)]
    assert [sequence.parent.id for sequence in advance(line)] == ["c"]
    line.remove_request("c")
    assert (line.active, line.waiting, line.slots.busy, line.wanted_slots()) == (0, 0, 0, 0)
    assert pool.used == 0


def test_group_without_requests_is_dropped(line: Scheduler, admit: Any) -> None:
    admit("a", 300)
    line.next_group()
    line.remove_request("a")
    assert line.group is None and line.waiting == 0


def test_prompt_logprobs_are_put_together_from_pieces(line: Scheduler, admit: Any) -> None:
    (sequence,) = admit("a", 170, prompt_logprobs=True)
    expected = np.arange(169, dtype=np.float32)
    group = line.next_group()
    assert group is not None
    while group.remaining > 0:
        piece = group.piece
        padded = np.full((1, piece), 1e9, np.float32)
        here = expected[group.start : group.start + piece]
        padded[0, : len(here)] = here
        group.advance(piece, PieceScores(padded))
    assert sequence.parent.scores is not None
    logprobs = sequence.parent.scores.add_to(SampleResult("a")).prompt_logprobs_T
    assert logprobs is not None and np.isnan(logprobs[0])
    np.testing.assert_array_equal(logprobs[1:], expected)


def grow(line: Scheduler, chunks: int, steps: int = 8) -> None:
    for _ in range(chunks):
        line.reserve_pages(steps)
        for sequence in line.slots.sequences:
            sequence.append([1] * steps, [0.0] * steps)


def test_youngest_sequence_yields_its_pages_and_then_reserves_its_maximum() -> None:
    pool = PagePool(7, page=32)
    line = Scheduler(SHAPES, 10, pool)
    parents = [admit_into(line, ask(name, range(20), 64))[0].parent for name in "abc"]
    advance(line)
    assert [len(one.table.pages) for one in line.slots.sequences] == [1, 1, 1]
    grow(line, 6)
    assert [one.parent for one in line.slots.sequences] == parents[:2], "six pages: three for each of two sequences"
    assert line.next_group() is None, "c may need three pages, which are not free"
    grow(line, 2)
    line.slots.remove(line.slots.sequences[0])
    group = line.next_group()
    assert group is not None and group.jobs[0].parent is parents[2]
    (again,) = advance(line)
    assert again.preempted_at == 60 and len(again.tokens) == 40 and len(again.table.pages) == 3
    pages = list(again.table.pages)
    line.slots.remove(line.slots.sequences[0])
    grow(line, 3)
    assert again.table.pages == pages and pool.pop_copies() == [], "it needs no further page"


def test_preempted_sequence_with_a_high_limit_joins_with_pages_for_twice_its_tokens() -> None:
    pool = PagePool(9, page=32)
    line = Scheduler(SHAPES, 10, pool)
    *_, last = [admit_into(line, ask(name, range(20), 10_000))[0].parent for name in "abc"]
    advance(line)
    grow(line, 6)
    line.remove_request("a")
    group = line.next_group()
    assert group is not None and group.jobs[0].parent is last
    (again,) = advance(line)
    assert again.preempted_at == 60 and len(again.table.pages) == 4, "for 120 tokens"


def test_prompt_waits_until_each_running_sequence_can_take_a_page() -> None:
    pool = PagePool(6, page=32)
    line = Scheduler(SHAPES, 10, pool)
    admit_into(line, ask("a", range(33), 60))
    advance(line)
    admit_into(line, ask("b", range(97), 60))
    assert pool.free(0) == 4 and line.next_group() is None
    line.remove_request("a")
    assert line.next_group() is not None


def test_reported_cache_hits_are_those_of_the_first_prefill(line: Scheduler, admit: Any) -> None:
    admit("before", 129, limit=2)
    advance(line)
    (sequence,) = admit("a", 200, limit=2)
    group = line.next_group()
    assert group is not None and (group.start, group.remaining, group.piece) == (128, 71, 64)
    group.begin(199)  # as after a preemption and another prefill
    advance(line)
    sequence.append([1, 2], [0.0, 0.0])
    (result,) = line.pop_finished()
    assert result.prompt_cache_hit_tokens == 128


def test_prefix_is_shared_only_if_the_prompt_is_prefilled_alone(line: Scheduler, admit: Any) -> None:
    admit("one", 5)
    alone = line.next_group()
    assert alone is not None and alone.scope == PrefixScope("owner", None)
    advance(line)
    for request_id in ("two", "three"):
        admit(request_id, 5)
    together = line.next_group()
    assert together is not None and together.scope is None
    advance(line)
    admit_into(line, replace(ask("draws", range(200)), prompt=PromptWishes(alternatives=1)))
    draws = line.next_group()
    assert draws is not None and draws.scope is None


def test_short_requests_overtake_longer_ones(line: Scheduler, admit: Any) -> None:
    admit("little", 5, limit=2)
    assert line.next_short_group(4, 8) is None  # there is no other request, so they use the batch
    admit("long", 5, limit=100)
    admit("many", 5, samples=5, limit=8)
    admit("long prompt", 300, limit=1)
    admit("last", 5, samples=3, limit=8)
    group = line.next_short_group(4, 8)
    assert group is not None and [job.parent.id for job in group.jobs] == ["little", "last"]
    assert line.next_short_group(4, 8) is None and line.waiting == 5


def test_jobs_of_a_group_and_samples_of_a_prompt_spread_over_the_shards() -> None:
    pool = PagePool(50, shards=2)
    line = Scheduler(make_shapes(max_slots=8, fsdp=2), 8, pool)
    for name in "abcd":
        admit_into(line, ask(name, range(20), 8))
    group = line.next_group()
    assert group is not None and group.rows == 4
    each = group.rows // pool.shards
    assert sorted(job.row for job in group.jobs) == [0, 1, 2, 3]
    assert all(job.row // each == job.table.shard for job in group.jobs)
    advance(line)
    slots, held = line.slots.assign(line.slots.sequences)
    assert all(slot // (slots // pool.shards) == sequence.table.shard for slot, sequence in held)
    assert sorted(sequence.table.shard for sequence in line.slots.sequences) == [0, 0, 1, 1]


def test_prompt_as_long_as_the_pool_is_partly_reused() -> None:
    pool = PagePool(4)
    line = Scheduler(SHAPES, 10, pool)
    admit_into(line, ask("a", range(341), 1))
    advance(line)
    line.slots.sequences[0].append([1], [0.0])
    line.slots.remove(line.slots.sequences[0])
    admit_into(line, replace(ask("b", range(341), 1, prompt_logprobs=True), prompt=PromptWishes(last_n=10)))
    group = line.next_group()
    assert group is not None and group.start == 256, "320 tokens are known, up to the middle of the last of three pages"


def test_pages_of_a_prompt_stay_its_own_until_a_chunk_shows_that_they_are_finite() -> None:
    pool = PagePool(4, page=32)
    line = Scheduler(SHAPES, 10, pool)
    admit_into(line, ask("a", range(20), 40))
    advance(line)
    (page,) = line.slots.sequences[0].table.pages
    line.reserve_pages(8)
    assert line.slots.sequences[0].table.pages != [page], "the prompt is kept, so its last page is copied"
    assert pool.used == 2, "no other request uses it before the first chunk"
    grow(line, 1)
    line.reserve_pages(4)
    assert pool.used == 1


def test_tainted_pages_of_a_sample_and_its_copy_in_another_shard_are_zeroed() -> None:
    pool = PagePool(50, shards=2)
    line = Scheduler(make_shapes(max_slots=8, fsdp=2), 8, pool)
    admit_into(line, ask("a", range(20), 8, num_samples=2))
    advance(line)
    pages = {page for one in line.slots.sequences for page in one.table.pages}
    assert len(pages) == 2
    line.slots.remove(line.slots.sequences[0])
    pool.pop_copies()
    line.remove_request("a", tainted=True)
    assert pages == {copy.into for copy in pool.pop_copies()}
    assert pool.used == 0


def test_short_requests_beside_the_batch_get_one_slot_each_in_their_shard() -> None:
    pool = PagePool(50, shards=4)
    line = Scheduler(make_shapes(max_slots=4, fsdp=4), 4, pool)
    admit_into(line, ask("long", range(20), 100))
    for samples in (2, 1):
        admit_into(line, ask(str(samples), range(5), 4, num_samples=samples))
    group = line.next_short_group(4, 8)
    assert group is not None and [job.parent.id for job in group.jobs] == ["1"]
    slots, held = line.slots.assign(line.start_short_group(group))
    assert [slot // (slots // pool.shards) for slot, _ in held] == [one.table.shard for _, one in held]


def test_full_page_pool_stays_busy_and_preempts_no_request_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """1,024 requests of 512 tokens and up to 7,680 more, with pages for a sixteenth of their largest size."""
    pool, chunk, most = PagePool(4096), 64, 7680
    line = Scheduler(make_shapes(max_slots=256, fsdp=1, pieces=CUDA.prefill_tokens), 256, pool)
    lengths = np.random.default_rng(0).integers(1, most + 1, 1024).tolist()
    for number in range(1024):
        admit_into(line, ask(str(number), range(512), most, owner="ab"[number % 2]))
    begun, left, busy, preempted = dict[int, None](), list[int](), list[float](), Counter[int]()
    real = Scheduler._requeue

    def counted(self: Scheduler, sequence: ActiveSequence) -> None:
        preempted[int(sequence.parent.id)] += 1
        real(self, sequence)

    monkeypatch.setattr(Scheduler, "_requeue", counted)
    while line.waiting or line.active:
        while line.next_group() is not None:
            begun |= {int(one.parent.id): None for one in advance(line)}
        assert line.reserve_pages(chunk)
        if line.waiting_jobs:
            busy.append(pool.used / (pool.pages - 1))
        for sequence in line.slots.running:
            number = int(sequence.parent.id)
            rest = lengths[number] - len(sequence.tokens)
            tokens = [1] * chunk if rest > chunk else [1] * (rest - 1) + [STOP]
            if sequence.append(tokens, [0.0] * len(tokens)):
                line.slots.remove(sequence)
        left += [len(result.sequences[0].tokens_T) for result in line.pop_finished()]
    assert np.mean(busy) >= 0.9
    assert preempted and set(preempted.values()) == {1}
    assert sorted(left) == sorted(lengths) and not pool.used
    for owner in (0, 1):
        assert [one for one in begun if one % 2 == owner] == list(range(owner, 1024, 2))
