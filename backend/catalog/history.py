"""Reads a run's history: first its segments in the store, then the requests that are only in the journal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from tinkerflow.backend.spec.history import PastRequest, Segment

if TYPE_CHECKING:
    from tinkerflow.backend.journal import Journal
    from tinkerflow.backend.store import Store


def past_requests(journal: Journal, store: Store, run_id: str, *, after: int = -1) -> Iterator[PastRequest]:
    """The answered requests of a run with a seq_id above `after`, in order. One segment is in memory at a time.

    StoreError: a segment cannot be read, or is damaged.
    """
    while True:
        stored = _stored(journal, run_id, after)
        for segment in stored:
            for request in store.histories.read_segment(run_id, segment.name):
                if request.seq_id > after:
                    yield request
            after = segment.last
        if stored:
            continue
        recent = journal.histories.unarchived(run_id, after=after)
        if _stored(journal, run_id, after):
            continue  # some of these requests have left the journal meanwhile
        if not recent:
            return
        yield from recent
        after = recent[-1].seq_id


def _stored(journal: Journal, run_id: str, after: int) -> list[Segment]:
    return [segment for segment in journal.histories.segments(run_id) if segment.last > after]
