"""Fair sharing between owners. Every place where projects compete for a resource uses this queue.

`FairQueue` is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each ticket gets a start tag: the later of
the queue's virtual time and the end of its owner's previous ticket. Tickets are served in the order of start tags, and
a ticket ends `cost / weight` after its start. Over any period in which two owners always wait, the cost served to them,
divided by their weights, differs by at most one ticket of each.
"""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Ticket(Generic[T]):
    """One item in the queue. start: its start tag. cost: how much of its owner's share it consumes."""

    owner: str
    item: T
    start: float
    cost: float
    number: int  # of arrival: of equal start tags, the first to arrive is served first


class FairQueue(Generic[T]):
    """Items of several owners in the order of service. Items of one owner keep their order.

    To queue an item, or to serve the first item of an owner, takes the same time with any number of waiting items.
    """

    def __init__(self, weight: Callable[[str], float] = lambda owner: 1.0) -> None:
        """Create an empty queue. weight: an owner's weight, above 0. An owner with weight 2 gets twice the service."""
        self._weight = weight
        self._tickets: dict[str, deque[Ticket[T]]] = {}  # by owner with tickets, in the order of service
        self._sorted: list[Ticket[T]] | None = None  # all tickets; None after a change
        self._numbers = itertools.count()
        self._now = 0.0  # virtual time: the start tag of the last ticket served
        self._ends: dict[str, float] = {}  # by owner: when its last ticket ends; dropped when this is past

    def __len__(self) -> int:
        return sum(map(len, self._tickets.values()))

    def __iter__(self) -> Iterator[Ticket[T]]:
        """The tickets in the order of service."""
        if self._sorted is None:
            self._sorted = sorted(itertools.chain.from_iterable(self._tickets.values()), key=_order)
        return iter(self._sorted)

    def push(self, owner: str, item: T, cost: float = 1.0, *, before: Ticket[T] | None = None) -> Ticket[T]:
        """Queue an item behind its owner's other items, and ahead of other owners' items beyond their share.

        cost: how much of its owner's share the item consumes; 0 if `charge` adds it later. before: a ticket of the
        same owner. The item takes that ticket's place, and the owner's tickets from there on move back. Other owners'
        tickets keep their places.
        """
        size = cost / self._weight(owner)
        start = max(self._now, self._ends.get(owner, 0.0))
        self._ends[owner] = start + size
        own = self._tickets.setdefault(owner, deque())
        place = len(own)
        if before is not None:
            start, place = before.start, own.index(before)
            for queued in itertools.islice(own, place, None):
                queued.start += size
        ticket = Ticket(owner, item, start, cost, next(self._numbers))
        own.insert(place, ticket)
        self._sorted = None
        return ticket

    def peek(self) -> Ticket[T] | None:
        """The ticket that is served next; None if the queue is empty."""
        return next(iter(self.firsts()), None)

    def firsts(self) -> list[Ticket[T]]:
        """The first ticket of each owner, in the order of service."""
        return sorted((own[0] for own in self._tickets.values()), key=_order)

    def waits(self, owner: str) -> bool:
        """Whether an owner has tickets in the queue."""
        return owner in self._tickets

    def owes(self, owner: str) -> bool:
        """Whether an owner's next ticket would start later than the first ticket of a new owner."""
        return self._ends.get(owner, 0.0) > self._now

    def serve(self, ticket: Ticket[T]) -> T:
        """Serve a ticket: remove it and return its item.

        Any ticket may be served, not only the first. Virtual time never passes a queued ticket, so a new owner starts
        behind served tickets only.
        """
        self._remove(ticket)
        first = self.peek()
        self._now = max(self._now, ticket.start if first is None else min(ticket.start, first.start))
        self._ends = {owner: end for owner, end in self._ends.items() if end > self._now}
        return ticket.item

    def withdraw(self, ticket: Ticket[T]) -> None:
        """Remove a cancelled ticket. Its owner is not charged for it."""
        self._remove(ticket)
        saved = ticket.cost / self._weight(ticket.owner)
        for queued in self._tickets.get(ticket.owner, ()):
            if queued.start > ticket.start:
                queued.start = max(self._now, queued.start - saved)
        self._ends[ticket.owner] = max(self._now, self._ends.get(ticket.owner, 0.0) - saved)

    def charge(self, owner: str, cost: float) -> None:
        """Charge an owner for work that had no ticket. The owner's next ticket starts later."""
        self._ends[owner] = max(self._now, self._ends.get(owner, 0.0)) + cost / self._weight(owner)

    def _remove(self, ticket: Ticket[T]) -> None:
        own = self._tickets[ticket.owner]
        own.remove(ticket)
        self._sorted = None
        if not own:
            del self._tickets[ticket.owner]


_order = attrgetter("start", "number")


def equal_places(places: int, taken: Mapping[str, int], waiting: Mapping[str, int]) -> dict[str, int]:
    """The number of items to admit for each owner. The owners with the fewest places come first.

    places: free places. taken: the places held by each owner. waiting: the items of each owner in the queue.
    """
    line = [(taken.get(owner, 0), owner) for owner, count in waiting.items() if count > 0]
    heapq.heapify(line)
    shares: Counter[str] = Counter()
    while line and shares.total() < places:
        have, owner = line[0]
        shares[owner] += 1
        if shares[owner] < waiting[owner]:
            heapq.heapreplace(line, (have + 1, owner))
        else:
            heapq.heappop(line)
    return dict(shares)
