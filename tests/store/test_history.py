"""Histories are read back byte for byte, equal data are stored once, and damage is detected and located."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from random import Random

import pytest

from tinkerflow.backend.core.errors import StoreError, UserError
from tinkerflow.backend.spec.history import PastRequest, digest
from tinkerflow.backend.spec.outliers import BlamedRow
from tinkerflow.backend.store import Store
from tinkerflow.backend.store import history as module
from tinkerflow.backend.store.history import HistoryStore

RUN = "sess-1:train:0"
AT = datetime(2026, 11, 27, tzinfo=UTC)


def request(seq, payload, error=None):
    return PastRequest(seq, "forward_backward", f"req-{seq}", payload, error, "" if error else digest(b"r"), AT)


def joined(*pieces):
    return b"|".join(pieces)


def split(past):
    """Pieces with their separators, so that they join to the payload."""
    pieces = past.payload.split(b"|")
    return [piece + b"|" for piece in pieces[:-1]] + pieces[-1:]


def unlike(seed, size=4000):
    return bytes(Random(seed).choices(range(97), k=size))  # without "|"


def test_requests_come_back_as_they_were_and_equal_data_are_stored_once(store: Store) -> None:
    histories, one, two = store.histories, unlike(1), unlike(2)
    requests = [request(0, b"{}"), request(1, joined(b"h1", one, two, b"")), request(2, joined(b"h2", two, one, b""))]
    first = histories.write_segment(RUN, requests, split)
    assert (first.first, first.last) == (0, 2)
    later = [request(3, joined(b"h3", one, two, one, b"")), request(4, b"", "it failed")]
    second = histories.write_segment(RUN, later, split)
    assert second.size_bytes < 1000 < first.size_bytes, "only references"
    for reader in (histories, HistoryStore(store.url, store.blobs)):
        assert reader.read_segment(RUN, second.name) == later
        assert reader.read_segment(RUN, first.name) == requests
    other = histories.write_segment("sess-2:train:0", [request(1, joined(one, b""))], split)
    assert other.size_bytes > second.size_bytes, "nothing is shared between runs, so that each can be deleted"
    histories.remove_history(RUN)
    with pytest.raises(StoreError, match="cannot read the history of run"):
        HistoryStore(store.url, store.blobs).read_segment(RUN, first.name)
    again = histories.write_segment(RUN, later, split)
    assert histories.read_segment(RUN, again.name) == later, "it does not refer to what was removed"


def test_the_rows_of_examined_steps_are_kept_until_the_history_goes(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_MOST_EXAMINED", 3)
    rows = [BlamedRow(3, 20, None, None, ((1, 7, -9.5),), (4, 5)), BlamedRow(0, 5, 1.5, 2.0)]
    for step in (2, 12, 5):
        store.histories.write_blame(RUN, step, rows[:1])
    store.histories.write_blame(RUN, 5, rows)
    assert store.histories.blames(RUN) == {12: rows[:1], 5: rows, 2: rows[:1]}
    assert list(store.histories.blames(RUN, 1)) == [12]
    with pytest.raises(UserError, match="step 6: run 'sess-1:train:0' has the rows of 3 steps, the most of a run"):
        store.histories.write_blame(RUN, 6, rows)
    store.histories.remove_history(RUN)
    assert store.histories.blames(RUN) == {}


def test_rows_that_two_requests_write_together_are_the_rows_of_one(store: Store) -> None:
    rows = {number: [BlamedRow(number, 20, None, None)] for number in range(8)}
    with ThreadPoolExecutor(len(rows)) as threads:
        list(threads.map(lambda number: store.histories.write_blame(RUN, 3, rows[number]), rows))
    assert store.histories.blames(RUN)[3] in rows.values()


def test_damaged_rows_of_an_examined_step_are_an_error_of_the_store(store: Store) -> None:
    store.blobs.create(f"history/{RUN}/blame-000000000003", b"[{")
    with pytest.raises(StoreError, match=f"history of run {RUN}: the rows of step 3 are damaged"):
        store.histories.blames(RUN)


def test_every_flipped_bit_is_detected_and_named(tmp_path) -> None:
    store = Store.open(f"file://{tmp_path}")
    requests = [request(seq, joined(unlike(seq, 200), b"")) for seq in range(3, 6)]
    segment = store.histories.write_segment(RUN, requests, split)
    file = tmp_path / "history" / RUN / segment.name
    whole = file.read_bytes()
    named = set()
    for place in range(0, len(whole), 7):
        damaged = bytearray(whole)
        damaged[place] ^= 1 << place % 8
        file.write_bytes(bytes(damaged))
        with pytest.raises(StoreError, match=f"history of run {RUN}") as error:
            HistoryStore(store.url, store.blobs).read_segment(RUN, segment.name)
        named.add(str(error.value).rpartition("after number ")[2])
    assert {"2", "3", "4"} <= named


def test_unrecorded_segment_is_removed_with_its_references(store: Store) -> None:
    histories, data = store.histories, joined(unlike(1), b"")
    lost = histories.write_segment(RUN, [request(1, data)], split)
    histories.remove_segment(RUN, lost.name)
    kept = histories.write_segment(RUN, [request(1, data)], split)
    assert HistoryStore(store.url, store.blobs).read_segment(RUN, kept.name) == [request(1, data)]
