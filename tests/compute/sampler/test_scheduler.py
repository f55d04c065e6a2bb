"""The host state machine alone: no arrays of any device."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from tinkerflow.backend.commands import PromptWishes, SampleResult
from tinkerflow.backend.compute.sampler.prompt_scores import PieceScores, prompt_scores
from tinkerflow.backend.compute.sampler.requests import ActiveSequence, ParentRequest, PrefixScope
from tinkerflow.backend.compute.sampler.sampling import UniformStream
from tinkerflow.backend.compute.sampler.scheduler import Scheduler, SlotAssignment
from tinkerflow.backend.compute.sampler.shapes import make_shapes
from tinkerflow.backend.compute.sampler.stops import StopDetector

SHAPES = make_shapes(max_slots=16, max_context=2000, fsdp=1, most_cells=16 * 512)


@pytest.fixture
def line() -> Scheduler:
    return Scheduler(SHAPES, max_slots=10)


@pytest.fixture
def admit(line: Scheduler, ask: Any) -> Any:
    def make(
        request_id: str, length: int = 5, samples: int = 1, limit: int = 4, **changes: Any
    ) -> list[ActiveSequence]:
        request = ask(request_id, range(length), limit, num_samples=samples, **changes)
        parent = ParentRequest(request, None, limit, scores=prompt_scores(request, vocab=320))
        sequences = [
            ActiveSequence(parent, index, StopDetector(frozenset({99}), (), None), UniformStream(0, index))
            for index in range(samples)
        ]
        line.admit(parent, sequences)
        return sequences

    return make


def advance(line: Scheduler, slots: int = 16, length: int = 512) -> list[SlotAssignment]:
    """Prefill the next group wholly and seed it."""
    group = line.next_group(length)
    assert group is not None
    while group.remaining > 0:
        group.advance(group.piece, None)
    line.resize(slots)
    return line.assign_slots(length)


def test_short_prompts_go_together_and_long_ones_alone(line: Scheduler, admit: Any) -> None:
    for request_id, length in (("a", 5), ("b", 100), ("c", 300), ("d", 5)):
        admit(request_id, length)
    groups = []
    while group := line.next_group(128):
        groups.append([job.parent.request.request_id for job in group.jobs])
        advance(line)
    assert groups == [["a", "b"], ["c"], ["d"]]


def served(line: Scheduler) -> list[str]:
    """Who is prefilled and gets a slot, one after the other; nobody keeps theirs."""
    names = []
    while (group := line.next_group(512)) is not None:
        names += [job.parent.request.request_id for job in group.jobs]
        advance(line)
        line.slots = [None] * len(line.slots)
    return names


def test_owners_share_and_one_owners_requests_keep_their_order(line: Scheduler, admit: Any) -> None:
    for number in range(6):
        admit(f"a{number}", 300, owner="a")
    first = line.next_group(512)
    assert first is not None and first.jobs[0].parent.request.request_id == "a0"
    for number in range(2):
        admit(f"b{number}", 300, owner="b")
    admit("c0", 300, samples=3, owner="c")
    admit("c1", 300, owner="c")
    advance(line)
    assert served(line) == ["b0", "c0", "a1", "b1", "a2", "a3", "c1", "a4", "a5"]


def test_who_gave_up_is_not_charged(line: Scheduler, admit: Any) -> None:
    admit("b0", 300, owner="b")
    for number in range(5):
        admit(f"a{number}", 300, owner="a")
    for number in range(1, 5):
        line.remove(f"a{number}")
    admit("b1", 300, owner="b")
    admit("a5", 300, owner="a")
    admit("a6", 300, owner="a")
    admit("b2", 300, owner="b")
    assert served(line) == ["b0", "a0", "b1", "a5", "a6", "b2"]


def test_samples_of_one_request_share_a_row(line: Scheduler, admit: Any) -> None:
    admit("a", samples=3)
    admit("b", samples=2)
    assert advance(line) == [
        SlotAssignment(0, 0),
        SlotAssignment(0, 1),
        SlotAssignment(0, 2),
        SlotAssignment(1, 3),
        SlotAssignment(1, 4),
    ]
    assert (line.active, line.waiting, line.busy) == (2, 0, 5)


def test_a_group_waits_staged_until_every_sample_had_a_slot(line: Scheduler, admit: Any) -> None:
    admit("a", samples=13)
    admit("b")
    assert len(advance(line)) == 10  # max_slots, though 16 exist
    assert line.group is not None and line.next_group(512) is line.group
    assert line.assign_slots(512) == []
    line.slots[4] = line.slots[7] = None
    assert line.assign_slots(512) == [SlotAssignment(0, 4), SlotAssignment(0, 7)]
    line.slots[0] = None
    assert line.assign_slots(512) == [SlotAssignment(0, 0)]
    assert line.group is None


def test_nobody_is_prefilled_without_a_slot_for_the_result(line: Scheduler, admit: Any) -> None:
    admit("a", samples=10)
    admit("b")
    advance(line)
    assert line.next_group(512) is None
    assert (line.active, line.waiting) == (1, 1)


def test_a_sequence_ends_by_stop_or_by_length(admit: Any, line: Scheduler) -> None:
    stopped, full = admit("a", samples=2, limit=3)
    assert not stopped.take([7], [-0.5])
    assert stopped.take([99, 8], [-0.25, -1.0])
    assert full.take([99 - 1, 2, 99], [0.0, 0.0, 0.0])
    (result,) = line.finish()
    assert [s.tokens_T.tolist() for s in result.sequences] == [[7, 99], [98, 2, 99]]
    assert [s.stop_reason for s in result.sequences] == ["stop", "stop"]
    (alone,) = admit("b", limit=2)
    assert alone.take([1, 2, 3], [0.0, 0.0, 0.0])
    (result,) = line.finish()
    assert result.sequences[0].stop_reason == "length"
    assert result.sequences[0].tokens_T.tolist() == [1, 2]
    assert not line.holds("b")


def test_removing_frees_slots_queue_and_group(line: Scheduler, admit: Any) -> None:
    admit("a", samples=2)
    advance(line)
    admit("b")
    admit("c")
    group = line.next_group(512)
    admit("d")
    for request_id in ("a", "b", "d", "unknown"):
        line.remove(request_id)
    assert line.busy == 0 and line.group is group  # c is still in it
    assert [assignment.row for assignment in advance(line)] == [1]
    line.remove("c")
    assert (line.active, line.waiting, line.busy, line.wanted_slots()) == (0, 0, 0, 0)


def test_a_group_of_which_nobody_is_left_is_gone(line: Scheduler, admit: Any) -> None:
    admit("a", 300)
    line.next_group(512)
    line.remove("a")
    assert line.group is None and line.waiting == 0


def test_prompt_logprobs_are_put_together_from_pieces(line: Scheduler, admit: Any) -> None:
    (sequence,) = admit("a", 170, prompt_logprobs=True)
    expected = np.arange(169, dtype=np.float32)
    group = line.next_group(512)
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


def test_the_youngest_are_preempted_and_come_back_first(line: Scheduler, admit: Any) -> None:
    admit("a", samples=2)
    advance(line)
    _, late = admit("b", samples=2)
    advance(line)
    admit("c")
    late.take([3], [0.0])
    line.preempt(keep=3)
    assert line.busy == 3
    line.resize(4)
    group = line.next_group(512)
    assert group is not None
    assert [job.parent.request.request_id for job in group.jobs] == ["b", "c"]
    assert group.jobs[0].tokens_T.tolist() == [0, 1, 2, 3, 4, 3]
    assert list(group.jobs[0].sequences) == [late]


def test_resizing_moves_sequences_to_the_front(line: Scheduler, admit: Any) -> None:
    first, _, last = admit("a", samples=3)
    advance(line, slots=4)
    line.slots[1] = None
    assert line.resize(4) == [0, 2, -1, -1]
    assert line.slots == [first, last, None, None]


def test_what_is_known_of_a_prompt_is_reported_as_it_was_when_it_was_begun(line: Scheduler, admit: Any) -> None:
    (sequence,) = admit("a", 200, limit=2)
    group = line.next_group(512)
    assert group is not None and group.piece == 128
    group.begin(128)
    assert (group.remaining, group.piece) == (71, 64)
    advance(line)
    line.preempt(keep=0)
    again = line.next_group(512)
    assert again is not None
    again.begin(199)
    advance(line)
    sequence.take([1, 2], [0.0, 0.0])
    (result,) = line.finish()
    assert result.prompt_cache_hit_tokens == 128


def test_only_a_prompt_computed_in_shapes_of_its_own_is_shared(line: Scheduler, ask: Any, admit: Any) -> None:
    admit("one", 5)
    alone = line.next_group(128)
    assert alone is not None and alone.scope == PrefixScope("owner", None)
    advance(line)
    for request_id in ("two", "three"):
        admit(request_id, 5)
    together = line.next_group(128)
    assert together is not None and together.scope is None
    advance(line)
    request = replace(ask("draws", range(200)), prompt=PromptWishes(alternatives=1))
    parent = ParentRequest(request, None, 4, scores=prompt_scores(request, vocab=320))
    line.admit(parent, [ActiveSequence(parent, 0, StopDetector(frozenset(), (), None), UniformStream(0, 0))])
    draws = line.next_group(512)
    assert draws is not None and draws.scope is None


def test_who_wants_little_overtakes_whoever_does_not(line: Scheduler, admit: Any) -> None:
    admit("little", 5, limit=2)
    assert line.next_short_group(4, 8) is None  # nobody else is there: the batch is theirs
    admit("long", 5, limit=100)
    admit("many", 5, samples=5, limit=8)
    admit("long prompt", 300, limit=1)
    admit("last", 5, samples=3, limit=8)
    group = line.next_short_group(4, 8)
    assert group is not None and [job.parent.request.request_id for job in group.jobs] == ["little", "last"]
    assert line.next_short_group(4, 8) is None and line.waiting == 5
