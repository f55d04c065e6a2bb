"""The order of execution: contiguous runs, late earlier chunks, gaps. Hypothesis checks it against a simple model."""

from __future__ import annotations

import itertools

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tinkerflow.backend.journal import Kind, NewRequest
from tinkerflow.backend.journal.requests import MOST_ALONG


def test_missing_earlier_chunks_hold_back_later_ones(scene):
    model = scene.model()
    for seq in (3, 2, 5):
        scene.submit(model, seq)
        assert scene.ready(model) == []
        assert scene.journal.queue.pending_models() == []
    scene.submit(model, 1)
    assert scene.journal.queue.pending_models() == [model]
    assert scene.ready(model) == [1, 2, 3]
    scene.execute(model, limit=2)
    assert scene.ready(model) == [3]
    scene.execute(model)
    assert scene.ready(model) == []
    scene.submit(model, 4)
    assert scene.ready(model) == [4, 5]


def test_pending_request_carries_its_submitted_payload(scene):
    model = scene.model()
    pending = scene.taken(model, 1)
    assert (pending.kind, pending.payload) == (Kind.FORWARD_BACKWARD, b"payload 1")
    assert (pending.owner, pending.model_id, pending.seq_id) == ("local", model, 1)


def test_models_are_listed_by_base_model_with_the_longest_waiting_first(scene, clock):
    session = scene.session()
    late, early = scene.model(session, 0), scene.model(session, 1)
    other = scene.model(session, 2, base_model="other")
    for model in (early, late, other):
        scene.submit(model, 1)
        clock.advance(1)
    assert scene.journal.queue.pending_models() == [early, late, other]
    assert scene.journal.queue.pending_models("tiny") == [early, late]


def test_wanted_base_models_have_executable_requests(scene, clock):
    session = scene.session()
    queue = scene.journal.queue
    late, gap, paused, over = (
        scene.model(session, number, base_model=name) for number, name in enumerate(("late", "gap", "paused", "over"))
    )
    assert queue.wanted() == []
    sampler = scene.sampler(session)
    scene.sample(sampler, 0)
    clock.advance(1)
    scene.submit(late, 1)
    scene.submit(gap, 2)
    scene.submit(paused, 1)
    scene.journal.models.pause(paused, "people look at it")
    scene.journal.models.request_unload(over, "its session has ended")
    assert over in queue.pending_models()
    assert queue.wanted() == ["tiny", "late"]
    scene.journal.models.pause(paused, None)
    scene.submit(gap, 1)
    assert queue.wanted() == ["tiny", "gap", "late", "paused"]
    for model in (late, gap, paused):
        scene.execute(model)
    assert queue.wanted() == ["tiny"]


def test_creation_is_executed_first(scene):
    model = scene.model(live=False)
    assert scene.journal.queue.pending_models() == [model]
    assert scene.ready(model) == [0]


def test_many_failed_requests_do_not_hide_the_next(scene):
    model = scene.model()
    for seq in range(1, 31):
        scene.submit(model, seq, error="bad")
    scene.submit(model, 31)
    assert scene.ready(model, limit=5) == [31]
    assert scene.journal.queue.pending_models() == [model]


def test_an_unload_waits_for_pages_that_are_still_to_come(scene):
    model = scene.model()
    for seq in range(1, 6):
        scene.submit(model, seq)
    scene.journal.models.request_unload(model, "bye")
    seen = []
    while True:
        run = scene.journal.requests.ready(model, limit=2)
        seen += [pending.seq_id for pending in run]
        scene.journal.results.finish([pending.done(b"", "json") for pending in run])
        if run[-1].kind is Kind.UNLOAD:
            break
    assert seen == [1, 2, 3, 4, 5, None]


def test_overtaken_request_is_ready_first(scene, clock):
    model = scene.model()
    for seq in (1, 2, 3):
        scene.submit(model, seq)
    save, *others = scene.journal.requests.ready(model)
    scene.journal.results.finish([one.done(b"", "json") for one in others])
    assert scene.ready(model) == [1]
    assert scene.journal.queue.pending_models() == [model]
    scene.submit(model, 6)
    assert scene.ready(model) == [1], "4 and 5 are still to come"
    scene.submit(model, 5, error="bad")
    scene.submit(model, 4)
    assert scene.ready(model) == [1, 4, 6]
    clock.advance(100)
    assert scene.journal.queue.gaps(60) == []
    scene.journal.results.finish([save.done(b"", "json")])
    assert scene.ready(model) == [4, 6]


def test_a_gap_is_seen_after_its_time_and_skipped(scene, clock):
    model = scene.model()
    scene.submit(model, 2, error="bad")
    clock.advance(30)
    scene.submit(model, 4)
    clock.advance(59)
    assert scene.journal.queue.gaps(60) == []
    clock.advance(1)
    (gap,) = scene.journal.queue.gaps(60)
    assert (gap.model_id, gap.next_seq, gap.first_waiting, gap.missing) == (model, 1, 4, 2)
    assert scene.journal.queue.skip_gap(gap)
    assert scene.ready(model) == [4]
    assert scene.journal.queue.gaps(60) == []
    assert not scene.journal.queue.skip_gap(gap)


def test_filled_gap_is_not_skipped(scene, clock):
    model = scene.model()
    scene.submit(model, 3)
    clock.advance(61)
    (gap,) = scene.journal.queue.gaps(60)
    scene.submit(model, 2)
    assert not scene.journal.queue.skip_gap(gap)
    (narrower,) = scene.journal.queue.gaps(60)
    assert narrower.missing == 1
    scene.submit(model, 1, error="bad")
    assert not scene.journal.queue.skip_gap(narrower)
    assert scene.ready(model) == [2, 3]


def test_long_queue_has_no_gap(scene, clock):
    model = scene.model()
    scene.submit(model, 1)
    scene.submit(model, 2)
    clock.advance(1000)
    assert scene.journal.queue.gaps(60) == []


def test_samples_come_oldest_first_across_samplers_with_their_sampler(scene, clock):
    session = scene.session()
    base = scene.sampler(session, 0)
    tuned = scene.sampler(session, 1, snapshot_id="snap-1")
    ids = []
    for seq, sampler in enumerate([base, tuned, base]):
        ids.append(scene.sample(sampler, seq))
        clock.advance(1)
    waiting = scene.journal.requests.pending_samples(10)
    assert [pending.id for pending in waiting] == ids
    assert [pending.sampler.snapshot_id for pending in waiting] == [None, "snap-1", None]
    assert [pending.id for pending in scene.journal.requests.pending_samples(10, exclude=ids[:2])] == ids[2:]
    assert [pending.id for pending in scene.journal.requests.pending_samples(1)] == ids[:1]
    assert scene.journal.requests.pending_samples(10, base_model="other") == []
    assert scene.journal.queue.pending_models() == []


def test_interactive_samples_get_half_of_the_places(scene, clock):
    sampler = scene.sampler(scene.session())
    batch, people = [], []
    for seq in range(12):
        found, interactive = (batch, False) if seq < 6 else (people, True)
        found.append(scene.sample(sampler, seq, interactive=interactive))
        clock.advance(1)

    def taken(limit, **given):
        return [one.id for one in scene.journal.requests.pending_samples(limit, **given)]

    assert taken(1) == people[:1]
    assert taken(1, odd_interactive=False) == batch[:1]
    assert taken(3, odd_interactive=False) == [people[0], *batch[:2]]
    assert taken(4) == [*people[:2], *batch[:2]]
    assert taken(9, exclude=batch[:3]) == [*people[:5], *batch[3:], people[5]]
    assert taken(100) == people + batch


def test_long_payloads_are_read_on_demand(scene):
    sampler = scene.sampler(scene.session())
    for seq, payload in enumerate([b"x" * MOST_ALONG, b"y" * (MOST_ALONG + 1)]):
        scene.journal.requests.submit(
            NewRequest(Kind.SAMPLE, scene.owner, payload, f"{seq}", sampler_id=sampler, seq_id=seq)
        )
    short, long = scene.journal.requests.pending_samples(10)
    assert (short.payload, short.left) == (b"x" * MOST_ALONG, 0)
    assert (long.payload, long.left) == (b"", MOST_ALONG + 1)
    assert scene.journal.requests.payload(long.id) == b"y" * (MOST_ALONG + 1)
    scene.journal.requests.cancel(long.id, scene.owner)
    assert scene.journal.requests.payload(long.id) is None


def test_waiting_samples_are_counted_and_selected_by_owner(scene, as_owner):
    other = as_owner("other")
    mine, theirs = scene.sampler(scene.session(), 0), other.sampler(other.session(), 0)
    for seq in range(3):
        scene.sample(mine, seq)
    asked = other.sample(theirs, 0)
    assert scene.journal.queue.waiting_samples() == {scene.owner: 3, "other": 1}
    assert scene.journal.queue.waiting_samples("tiny") == {scene.owner: 3, "other": 1}
    assert scene.journal.queue.waiting_samples("small") == {}
    assert [pending.id for pending in scene.journal.requests.pending_samples(10, owner="other")] == [asked]
    assert len(scene.journal.requests.pending_samples(10)) == 4


def test_statement_counts_do_not_grow(scene, statements):
    model = scene.model()
    for seq in range(1, 41):
        scene.submit(model, seq)
    with statements() as made:
        assert len(scene.journal.requests.ready(model)) == 40
        assert scene.journal.queue.pending_models() == [model]
        assert scene.journal.queue.gaps(1) == []
        assert scene.journal.requests.pending_samples(10) == []
    assert len(made) == 4


SEQ_IDS = st.permutations(range(1, 9))
NUMBER = itertools.count()


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(order=SEQ_IDS, bad=st.sets(st.integers(1, 8)), pauses=st.sets(st.integers(0, 7)))
def test_requests_execute_in_order_and_once_for_any_arrival_order(scene, order, bad, pauses):
    model = scene.model(n=next(NUMBER))
    executed, arrived = [], set()
    for index, seq in enumerate(order):
        scene.submit(model, seq, error="bad" if seq in bad else None)
        arrived.add(seq)
        head = next(n for n in itertools.count(1) if n not in arrived)
        expected = [n for n in range(1, head) if n not in bad and n not in executed]
        assert scene.ready(model) == expected
        assert (model in scene.journal.queue.pending_models()) == bool(expected)
        if index in pauses:
            executed += [pending.seq_id for pending in scene.execute(model)]
    executed += [pending.seq_id for pending in scene.execute(model)]
    assert executed == [seq for seq in range(1, 9) if seq not in bad]
