"""Reading a run's history: its segments in the store, and then the requests that are only in the journal."""

from __future__ import annotations

from collections.abc import Iterator

from tinkerflow.backend.journal import Journal
from tinkerflow.backend.spec.history import PastRequest
from tinkerflow.backend.store import Store


def past_requests(journal: Journal, store: Store, run_id: str, *, after: int = -1) -> Iterator[PastRequest]:
    """The answered requests of a run in order, those with a seq_id above `after`. One segment is in memory at a time.

    StoreError: a segment cannot be read, or is damaged.
    """
    while True:
        recent = journal.histories.unarchived(run_id, after=after)
        stored = [segment for segment in journal.histories.segments(run_id) if segment.last > after]
        if not (stored or recent):
            return
        # The segments were listed last, so they have everything that has left the journal since.
        page = (
            [request for request in store.histories.read_segment(run_id, stored[0].name) if request.seq_id > after]
            if stored
            else recent
        )
        yield from page
        after = page[-1].seq_id
