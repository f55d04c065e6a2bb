"""Histories of training runs: requests in compressed segments, with equal data of a run stored once.

A segment is an object `history/{run}/{name}` that is written once. Each of its records has its own checksum and its own
compressed data, so damage is confined to one request. A payload is cut into pieces. A piece that the run has already
stored becomes a reference to the earlier request. The writer remembers the newest pieces only in memory, so equal data
is stored once more after a restart of the engine.

The rows of examined steps (`spec.outliers`) are stored in the same folder, under the number of the step.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from datetime import datetime
from threading import Lock
from typing import NamedTuple

import msgspec
import zstandard

from tinkerflow.backend.core.errors import StoreError, UserError
from tinkerflow.backend.core.ids import new_id
from tinkerflow.backend.spec.checkpoint import check_run_id
from tinkerflow.backend.spec.history import PastRequest, Segment, digest
from tinkerflow.backend.spec.outliers import BlamedRow
from tinkerflow.backend.store.blobs import Blobs, find, put
from tinkerflow.backend.store.failures import store_errors

_FOLDER = "history"
_MAGIC = b"tinkerflow history 1\n"
_SHORTEST_SHARED = 64  # bytes of a piece; references to shorter pieces save nothing
_LEVEL = 6  # of zstd
_REMEMBERED = 100_000  # pieces of all runs, about 20 MB
_EXAMINED = "blame-"  # followed by the step: the rows of an examined step
_MOST_EXAMINED = 50  # steps of a run
_CACHED = 4  # segments whose records are kept in memory for references


class _Piece(NamedTuple):
    """Where a piece is stored: the segment ("": the same one), the request in it, and the place in the request."""

    segment: str
    seq_id: int
    place: int


class _Record(msgspec.Struct, array_like=True):
    """A request in a segment. sizes: the bytes of each piece stored with it. data: these pieces, compressed."""

    seq_id: int
    kind: str
    request_id: str
    error: str | None
    result_hash: str
    answered_at: datetime
    payload_hash: str
    pieces: list[_Piece]
    sizes: list[int]
    data: bytes

    def own(self) -> list[bytes]:
        """The pieces stored with this request."""
        data, start, found = zstandard.ZstdDecompressor().decompress(self.data), 0, []
        for size in self.sizes:
            found.append(data[start : start + size])
            start += size
        return found


_RECORD = msgspec.msgpack.Decoder(_Record)
_ROWS = msgspec.json.Decoder(list[BlamedRow])
_SEGMENT = msgspec.msgpack.Decoder(list[tuple[bytes, bytes]])


class HistoryStore:
    """The histories in a store. Methods block, and raise StoreError if the store fails.

    unsure: the newest segment of a run, if it was written but the database failed while it was recorded.
    """

    def __init__(self, url: str, blobs: Blobs) -> None:
        """blobs: contain the histories. url: identifies the store in messages."""
        self.unsure: dict[str, str] = {}  # by run
        self._url, self._blobs = url, blobs
        self._stored: OrderedDict[tuple[str, bytes], _Piece] = OrderedDict()
        self._segments: OrderedDict[tuple[str, str], dict[int, _Record]] = OrderedDict()
        self._lock = Lock()

    def write_segment(
        self, run_id: str, requests: Sequence[PastRequest], split: Callable[[PastRequest], Sequence[bytes]]
    ) -> Segment:
        """Write requests of a run, in order, as a new segment.

        split: cuts a payload into pieces that other payloads may also contain.
        """
        name = new_id(f"{requests[0].seq_id:012d}")
        new: dict[tuple[str, bytes], _Piece] = {}
        records = []
        for request in requests:
            record = self._record(run_id, name, request, split(request), new)
            encoded = msgspec.msgpack.encode(record)
            records.append((hashlib.sha256(encoded).digest(), encoded))
        data = _MAGIC + msgspec.msgpack.encode(records)
        with store_errors(self._url, f"write the history of run {run_id}"):
            self._blobs.create(_key(run_id, name), data)
        with self._lock:
            self._stored.update(new)
            while len(self._stored) > _REMEMBERED:
                self._stored.popitem(last=False)
        return Segment(name, requests[0].seq_id, requests[-1].seq_id, len(data))

    def read_segment(self, run_id: str, name: str) -> list[PastRequest]:
        """The requests in a segment. StoreError: names the request whose record or data is damaged."""
        return [self._request(run_id, name, record) for record in self._records(run_id, name).values()]

    def remove_segment(self, run_id: str, name: str) -> None:
        """Remove a segment that was just written, so that no segment refers to it."""
        with store_errors(self._url, f"remove a part of the history of run {run_id}"):
            self._blobs.remove(_key(run_id, name))
        self._forget_pieces(run_id)

    def remove_history(self, run_id: str) -> None:
        with store_errors(self._url, f"remove the history of run {run_id}"):
            self._blobs.remove_folder(f"{_FOLDER}/{check_run_id(run_id)}")
        self._forget_pieces(run_id)

    def write_blame(self, run_id: str, step: int, rows: Sequence[BlamedRow]) -> None:
        """Store the worst rows of an examined step, replacing earlier rows. UserError: too many steps are kept."""
        key = _key(run_id, f"{_EXAMINED}{step:012d}")
        with store_errors(self._url, f"write the examined rows of run {run_id}"):
            known = self._examined(run_id)
            if step not in known and len(known) >= _MOST_EXAMINED:
                raise UserError(f"step {step}: run {run_id!r} has the rows of {len(known)} steps, the most of a run")
            while not put(self._blobs, key, find(self._blobs, key), msgspec.json.encode(rows)):
                pass  # another request changed the rows meanwhile, and the later one counts

    def blames(self, run_id: str, most: int = 5) -> dict[int, list[BlamedRow]]:
        """The rows that `write_blame` stored for the last `most` steps, by step, newest first."""
        found = {}
        with store_errors(self._url, f"read the examined rows of run {run_id}"):
            for step in reversed(self._examined(run_id)[-most:]):
                data = self._blobs.read(_key(run_id, f"{_EXAMINED}{step:012d}"))
                try:
                    found[step] = _ROWS.decode(data)
                except msgspec.MsgspecError as error:
                    raise StoreError(
                        f"history of run {run_id}: the rows of step {step} are damaged ({error})"
                    ) from error
        return found

    def _examined(self, run_id: str) -> list[int]:
        names = self._blobs.children(f"{_FOLDER}/{check_run_id(run_id)}")
        return [int(name.removeprefix(_EXAMINED)) for name in names if name.startswith(_EXAMINED)]

    def _forget_pieces(self, run_id: str) -> None:
        with self._lock:
            for key in [key for key in self._stored if key[0] == run_id]:
                del self._stored[key]

    def _record(
        self,
        run_id: str,
        name: str,
        request: PastRequest,
        pieces: Sequence[bytes],
        new: dict[tuple[str, bytes], _Piece],
    ) -> _Record:
        """Make the record of a request. new: the pieces of this segment; the record's pieces are added."""
        own: list[bytes] = []
        places = []
        for piece in pieces:
            key = (run_id, hashlib.sha256(piece).digest())
            where = new.get(key) or self._stored.get(key)
            if where is None:
                where = _Piece(name, request.seq_id, len(own))
                own.append(piece)
                if len(piece) >= _SHORTEST_SHARED:
                    new[key] = where
            places.append(_Piece("", *where[1:]) if where.segment == name else where)
        return _Record(
            request.seq_id,
            request.kind,
            request.request_id,
            request.error,
            request.result_hash,
            request.answered_at,
            digest(request.payload),
            places,
            [len(piece) for piece in own],
            zstandard.ZstdCompressor(level=_LEVEL).compress(b"".join(own)),
        )

    def _records(self, run_id: str, name: str) -> dict[int, _Record]:
        with self._lock:
            if (run_id, name) in self._segments:
                self._segments.move_to_end((run_id, name))
                return self._segments[run_id, name]
        with store_errors(self._url, f"read the history of run {run_id}"):
            data = self._blobs.read(_key(run_id, name))
        damaged = f"history of run {run_id}: segment {name}"
        try:
            if not data.startswith(_MAGIC):
                raise StoreError(f"{damaged} does not begin as a history")
            records: dict[int, _Record] = {}
            for checksum, encoded in _SEGMENT.decode(data[len(_MAGIC) :]):
                if hashlib.sha256(encoded).digest() != checksum:
                    after = max(records, default=int(name[:12]) - 1)
                    raise StoreError(f"{damaged} is damaged in the request after number {after}")
                record = _RECORD.decode(encoded)
                records[record.seq_id] = record
        except msgspec.MsgspecError as error:
            raise StoreError(f"{damaged} is damaged ({error})") from error
        with self._lock:
            self._segments[run_id, name] = records
            while len(self._segments) > _CACHED:
                self._segments.popitem(last=False)
        return records

    def _request(self, run_id: str, name: str, record: _Record) -> PastRequest:
        own: dict[tuple[str, int], list[bytes]] = {}
        parts = []
        for piece in record.pieces:
            where = (piece.segment or name, piece.seq_id)
            if where not in own:
                own[where] = self._records(run_id, where[0])[piece.seq_id].own()
            parts.append(own[where][piece.place])
        payload = b"".join(parts)
        if digest(payload) != record.payload_hash:
            raise StoreError(f"history of run {run_id}: the payload of request {record.seq_id} is damaged")
        return PastRequest(
            record.seq_id,
            record.kind,
            record.request_id,
            payload,
            record.error,
            record.result_hash,
            record.answered_at,
        )


def _key(run_id: str, name: str) -> str:
    return f"{_FOLDER}/{check_run_id(run_id)}/{name}"
