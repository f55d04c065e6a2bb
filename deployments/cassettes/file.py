"""The file of a cassette: a line that names the format, then one zstd stream of records.

A record consists of the length and the CRC-32 of a message (4 bytes each, little-endian) and the message in msgpack.
The last record is a `RecordingEnd`, with the number of records and the SHA-256 of all messages before it. A recorder
that is killed leaves a file without a `RecordingEnd`, which can be read up to that point.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import zstandard

from tinkerflow.backend.core.errors import UserError, broken

VERSION = 1
_NAME = b"tinkerflow cassette "
_FRAME = struct.Struct("<II")


class Exchange(msgspec.Struct, tag="exchange", omit_defaults=True):
    """A request with its answer.

    number: from 1, in the order of answers; 0 for requests that are not compared, such as the request for the client's
    configuration. target: the path with its query. body: decompressed. media: the Content-Type of the answer.
    location: the target of a redirect. range: the Range that was requested. content_range: the one that was sent.
    """

    number: int
    method: str
    target: str
    body: bytes
    status: int
    media: str
    answer: bytes
    location: str = ""
    range: str = ""
    content_range: str = ""


class FutureResult(msgspec.Struct, tag="result"):
    """The result of a future. media: its Content-Type."""

    request_id: str
    media: str
    body: bytes


class TokenizerFiles(msgspec.Struct, tag="tokenizer"):
    """The files of a tokenizer by name, for a base model that is a folder on the recording machine."""

    folder: str
    files: dict[str, bytes]


class RecordingEnd(msgspec.Struct, tag="end"):
    """Marks a recording as complete. records: the number of records. digest: the SHA-256 of their messages."""

    records: int
    digest: bytes


Record = Exchange | FutureResult | TokenizerFiles
_DECODER = msgspec.msgpack.Decoder(Exchange | FutureResult | TokenizerFiles | RecordingEnd)
_ENCODER = msgspec.msgpack.Encoder()


@dataclass(frozen=True)
class Recording:
    """The content of a cassette. whole: whether its end is recorded. digest: SHA-256 in hex, "" if not whole."""

    path: Path
    exchanges: list[Exchange] = field(default_factory=list)
    results: dict[str, FutureResult] = field(default_factory=dict)
    tokenizers: list[TokenizerFiles] = field(default_factory=list)
    whole: bool = True
    digest: str = ""

    @property
    def compared(self) -> list[Exchange]:
        """The requests that a program must repeat, in order."""
        return [one for one in self.exchanges if one.number]


class CassetteWriter:
    """Writes a cassette. `write` passes each record to the operating system before it returns.

    Until `close`, the file is named `path` plus `.part`, so an interrupted recording never replaces a good one.
    """

    def __init__(self, path: Path) -> None:
        """Create the file. UserError: the file cannot be written."""
        if path.is_dir():
            raise UserError(f"cassette {path} cannot be written: it is a folder")
        self.path = path
        self.part = path.with_name(path.name + ".part")
        try:
            self._file = self.part.open("wb")
        except OSError as error:
            raise UserError(f"cassette {path} cannot be written: {error.strerror}") from error
        self._file.write(_NAME + b"%d\n" % VERSION)
        self._zstd = zstandard.ZstdCompressor(level=9, write_checksum=True).compressobj()
        self._hash = hashlib.sha256()
        self._records = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if self._file.closed:
            return
        self._file.close()
        if not self._records:
            self.part.unlink()

    def write(self, record: Record) -> None:
        message = _ENCODER.encode(record)
        self._hash.update(message)
        self._records += 1
        self._append(message)
        self._file.write(self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK))
        self._file.flush()

    def close(self) -> str:
        """Mark the recording as whole, and move it to `path`. Returns its digest."""
        digest = self._hash.digest()
        self._append(_ENCODER.encode(RecordingEnd(self._records, digest)))
        self._file.write(self._zstd.flush(zstandard.COMPRESSOBJ_FLUSH_FINISH))
        self._file.close()
        self.part.replace(self.path)
        return digest.hex()

    def discard(self) -> None:
        """Remove the file."""
        self._file.close()
        self.part.unlink()

    def _append(self, message: bytes) -> None:
        self._file.write(self._zstd.compress(_FRAME.pack(len(message), zlib.crc32(message)) + message))


def read_cassette(path: Path, *, partial: bool = False) -> Recording:
    """Read a cassette.

    path: the file. partial: whether to accept a recording without an end, up to its last whole record.
    UserError: the file is missing, is not a cassette, has another version, is damaged, or has no end.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cassette {path} cannot be read: {error.strerror}") from error
    name, _, packed = data.partition(b"\n")
    if not name.startswith(_NAME):
        raise UserError(f"{path} begins with {data[:20]!r}, which is not a cassette")
    if name != _NAME + b"%d" % VERSION:
        version = name.removeprefix(_NAME).decode(errors="replace")
        raise broken(f"the version of cassette {path}", version, f"{VERSION}, as this release reads it")
    found, digest, records = Recording(path, whole=False), hashlib.sha256(), 0
    messages, ends, damage = _messages(packed)
    for message in messages:
        try:
            record = _DECODER.decode(message)
        except msgspec.MsgspecError as error:
            raise UserError(f"cassette {path} is damaged after record {records}: {error}") from error
        if isinstance(record, RecordingEnd):
            if (record.records, record.digest) != (records, digest.digest()):
                raise UserError(f"cassette {path} is damaged: its content does not match its digest; record it again")
            found = replace(found, whole=ends, digest=digest.hexdigest() if ends else "")
            break
        digest.update(message)
        records += 1
        match record:
            case Exchange():
                found.exchanges.append(record)
            case FutureResult():
                found.results[record.request_id] = record
            case TokenizerFiles():
                found.tokenizers.append(record)
    if damage:
        raise UserError(f"cassette {path} is damaged after record {records}: {damage}; record it again")
    if not found.whole and not partial:
        raise UserError(
            f"cassette {path} has no end: it was cut, or its recorder was killed, after request "
            f"{len(found.compared)}; record it again, or replay the requests before that with --partial (partial=True)"
        )
    return found


def _messages(packed: bytes) -> tuple[list[bytes], bool, str]:
    """The messages of a stream up to its end or the first damage, whether the stream is complete, and the damage."""
    unpacker, damage = zstandard.ZstdDecompressor().decompressobj(), ""
    try:
        plain = unpacker.decompress(packed)
    except zstandard.ZstdError as error:
        return [], False, str(error)
    messages, at = [], 0
    while at + _FRAME.size <= len(plain):
        length, checksum = _FRAME.unpack_from(plain, at)
        message = plain[at + _FRAME.size : at + _FRAME.size + length]
        if len(message) < length:
            break
        if zlib.crc32(message) != checksum:
            damage = "a checksum does not fit"
            break
        messages.append(message)
        at += _FRAME.size + length
    if unpacker.unused_data:
        damage = "more bytes follow its end"
    return messages, unpacker.eof, damage
