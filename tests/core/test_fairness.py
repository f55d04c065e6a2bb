from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tinkerflow.backend.core.fairness import FairQueue, Ticket, equal_places

COSTS = st.lists(st.floats(0.1, 10), min_size=40, max_size=40)


@given(COSTS, COSTS, st.floats(0.5, 4), st.integers(1, 79))
def test_waiting_owners_share_by_weight(a: list[float], b: list[float], weight: float, served: int) -> None:
    """The bound of Goyal, Vin and Cheng (theorem 1): the shares always differ by at most one ticket of each owner."""
    queue: FairQueue[float] = FairQueue(lambda owner: weight if owner == "a" else 1.0)
    for cost_a, cost_b in zip(a, b, strict=True):
        queue.push("a", cost_a, cost_a)
        queue.push("b", cost_b, cost_b)
    got = Counter[str]()
    for _ in range(served):
        ticket = queue.peek()
        assert ticket is not None
        got[ticket.owner] += queue.serve(ticket)
        if len({each.owner for each in queue}) < 2:
            return  # one owner has no more tickets
        assert abs(got["a"] / weight - got["b"]) <= max(a) / weight + max(b) + 1e-6


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.1, 10), st.booleans()), max_size=60))
def test_items_of_an_owner_keep_their_order(steps: list[tuple[str, float, bool]]) -> None:
    queue: FairQueue[int] = FairQueue()
    served: list[Ticket[int]] = []
    for number, (owner, cost, serve) in enumerate(steps):
        queue.push(owner, number, cost)
        if serve and (ticket := queue.peek()):
            queue.serve(ticket)
            served.append(ticket)
    served += list(queue)
    for owner in "abc":
        own = [ticket.item for ticket in served if ticket.owner == owner]
        assert own == sorted(own)


@given(st.lists(st.tuples(st.sampled_from("ab"), st.floats(0.1, 10)), min_size=1, max_size=30), st.data())
def test_a_withdrawn_ticket_costs_nothing(pushes: list[tuple[str, float]], data: st.DataObject) -> None:
    out = data.draw(st.integers(0, len(pushes) - 1))
    queue: FairQueue[int] = FairQueue()
    tickets = [queue.push(owner, number, cost) for number, (owner, cost) in enumerate(pushes)]
    queue.withdraw(tickets[out])
    without: FairQueue[int] = FairQueue()
    for number, (owner, cost) in enumerate(pushes):
        if number != out:
            without.push(owner, number, cost)
    starts = [{ticket.item: pytest.approx(ticket.start) for ticket in each} for each in (queue, without)]
    assert starts[0] == starts[1]


def test_late_owner_neither_pays_nor_is_paid_for_earlier_work() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(10):
        queue.push("early", f"early {number}")
    for _ in range(5):
        queue.serve(next(iter(queue)))
    queue.push("late", "late 0")
    queue.push("late", "late 1")
    assert [ticket.item for ticket in queue][:4] == ["late 0", "early 5", "late 1", "early 6"] or [
        ticket.item for ticket in queue
    ][:4] == ["early 5", "late 0", "early 6", "late 1"]


def test_sequential_owners_share_by_cost() -> None:
    """Each owner sends its next item only after the previous one was served."""
    queue: FairQueue[str] = FairQueue()
    queue.push("dear", "", 10)
    queue.push("cheap", "", 1)
    got = Counter[str]()
    for _ in range(110):
        ticket = queue.peek()
        assert ticket is not None
        queue.serve(ticket)
        got[ticket.owner] += 1
        queue.push(ticket.owner, "", ticket.cost)
    assert got["cheap"] == pytest.approx(10 * got["dear"], abs=10)


def test_a_charge_delays_the_owners_next_ticket() -> None:
    queue: FairQueue[str] = FairQueue()
    queue.charge("a", 2.5)
    queue.push("a", "a")
    for number in range(4):
        queue.push("b", f"b{number}")
    assert [ticket.item for ticket in queue] == ["b0", "b1", "b2", "a", "b3"]


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(1, 9)), min_size=2, max_size=20), st.data())
def test_item_pushed_before_a_ticket_takes_its_place_without_cost_to_other_owners(
    pushes: list[tuple[str, int]], data: st.DataObject
) -> None:
    queue: FairQueue[int] = FairQueue()
    tickets = [queue.push(owner, number, cost) for number, (owner, cost) in enumerate(pushes)]
    before = data.draw(st.sampled_from(tickets))
    starts = {ticket.item: ticket.start for ticket in queue}
    last = max(ticket.start + ticket.cost for ticket in tickets if ticket.owner == before.owner)
    queue.push(before.owner, -1, 3, before=before)
    for ticket in queue:
        moves = ticket.owner == before.owner and ticket.item >= before.item
        assert ticket.item == -1 or ticket.start == starts[ticket.item] + 3 * moves
    own = [ticket.item for ticket in queue if ticket.owner == before.owner]
    assert own[own.index(-1) + 1] == before.item
    assert queue.push(before.owner, 99).start == last + 3


def test_overtaking_ticket_does_not_advance_virtual_time_past_waiting_ones() -> None:
    queue: FairQueue[str] = FairQueue()
    for number in range(4):
        queue.push("a", f"a{number}")
    queue.serve([*queue][3])
    queue.push("b", "b0")
    assert [ticket.item for ticket in queue] == ["a0", "b0", "a1", "a2"]


def test_starts_ascend() -> None:
    queue: FairQueue[int] = FairQueue()
    for number in range(20):
        queue.push("ab"[number % 2], number, 1 + number % 3)
    assert all(first.start <= second.start for first, second in pairwise(queue))


@pytest.mark.parametrize(
    ("places", "taken", "waiting", "expected"),
    [
        (4, {}, {"a": 9, "b": 9}, {"a": 2, "b": 2}),
        (4, {"a": 8}, {"a": 9, "b": 9}, {"b": 4}),
        (4, {"a": 2}, {"a": 9, "b": 9}, {"b": 3, "a": 1}),
        (8, {"a": 8}, {"a": 9, "b": 2, "c": 0}, {"b": 2, "a": 6}),
        (8, {}, {"a": 3}, {"a": 3}),
        (0, {}, {"a": 3}, {}),
    ],
)
def test_places_go_to_the_owners_with_the_fewest(
    places: int, taken: dict[str, int], waiting: dict[str, int], expected: dict[str, int]
) -> None:
    assert equal_places(places, taken, waiting) == expected
