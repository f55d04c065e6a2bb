"""Fair sharing between owners. Every place where projects compete for a resource uses this queue.

`FairQueue` is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM 1996). Each ticket gets a start tag: the later of
the queue's virtual time and the end of its owner's previous ticket. Tickets are served in the order of start tags, and
a ticket ends `cost / weight` after its start. Over any period in which two owners always wait, the cost served to them,
divided by their weights, differs by at most one ticket of each.
"""

from __future__ import annotations

import bisect
import heapq
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class Ticket(Generic[T]):
    """One item in the queue. start: its start tag. cost: how much of its owner's share it consumes."""

    owner: str
    item: T
    start: float
    cost: float


class FairQueue(Generic[T]):
    """Items of several owners in the order of service. Items of one owner keep their order."""

    def __init__(self, weight: Callable[[str], float] = lambda owner: 1.0) -> None:
        """Create an empty queue. weight: an owner's weight, above 0. An owner with weight 2 gets twice the service."""
        self._weight = weight
        self._tickets: list[Ticket[T]] = []  # by start tag; ties in the order of arrival
        self._now = 0.0  # virtual time: the start tag of the last ticket served
        self._ends: dict[str, float] = {}  # by owner: when its last ticket ends; dropped when this is past

    def __len__(self) -> int:
        return len(self._tickets)

    def __iter__(self) -> Iterator[Ticket[T]]:
        """The tickets in the order of service."""
        return iter(tuple(self._tickets))

    def push(self, owner: str, item: T, cost: float = 1.0, *, before: Ticket[T] | None = None) -> Ticket[T]:
        """Queue an item behind its owner's other items, and ahead of other owners' items beyond their share.

        cost: how much of its owner's share the item consumes; 0 if `charge` adds it later. before: a ticket of the
        same owner. The item takes that ticket's place, and the owner's tickets from there on move back. Other owners'
        tickets keep their places.
        """
        size = cost / self._weight(owner)
        start = max(self._now, self._ends.get(owner, 0.0))
        self._ends[owner] = start + size
        if before is not None:
            start = before.start
            for queued in self._tickets[self._tickets.index(before) :]:
                queued.start += size if queued.owner == owner else 0
            self._tickets.sort(key=lambda queued: queued.start)
        ticket = Ticket(owner, item, start, cost)
        bisect.insort(self._tickets, ticket, key=lambda queued: queued.start)
        return ticket

    def peek(self) -> Ticket[T] | None:
        """The ticket that is served next; None if the queue is empty."""
        return self._tickets[0] if self._tickets else None

    def waits(self, owner: str) -> bool:
        """Whether an owner has tickets in the queue."""
        return any(ticket.owner == owner for ticket in self._tickets)

    def owes(self, owner: str) -> bool:
        """Whether an owner's next ticket would start later than the first ticket of a new owner."""
        return self._ends.get(owner, 0.0) > self._now

    def serve(self, ticket: Ticket[T]) -> T:
        """Serve a ticket: remove it and return its item.

        Any ticket may be served, not only the first. Virtual time never passes a queued ticket, so a new owner starts
        behind served tickets only.
        """
        self._tickets.remove(ticket)
        self._now = max(self._now, min(ticket.start, self._tickets[0].start) if self._tickets else ticket.start)
        self._ends = {owner: end for owner, end in self._ends.items() if end > self._now}
        return ticket.item

    def withdraw(self, ticket: Ticket[T]) -> None:
        """Remove a cancelled ticket. Its owner is not charged for it."""
        self._tickets.remove(ticket)
        saved = ticket.cost / self._weight(ticket.owner)
        for queued in self._tickets:
            if queued.owner == ticket.owner and queued.start > ticket.start:
                queued.start = max(self._now, queued.start - saved)
        self._tickets.sort(key=lambda queued: queued.start)
        self._ends[ticket.owner] = max(self._now, self._ends.get(ticket.owner, 0.0) - saved)

    def charge(self, owner: str, cost: float) -> None:
        """Charge an owner for work that had no ticket. The owner's next ticket starts later."""
        self._ends[owner] = max(self._now, self._ends.get(owner, 0.0)) + cost / self._weight(owner)


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
