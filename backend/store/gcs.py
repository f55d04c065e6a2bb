"""Objects in Google Cloud Storage through gcsfs: every write has a precondition, and every failure is an OSError.

After a 5xx, 408, 429 or a broken connection, gcsfs repeats a request six times with growing pauses. If the answer to a
write is lost, the repeated write is refused with 412. Then we check whether the object contains our bytes.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import aiohttp
import gcsfs
from gcsfs.retry import ChecksumError, HttpError
from google.auth.credentials import Signing
from google.auth.exceptions import GoogleAuthError

from tinkerflow.backend.store.objects import ObjectBlobs

RESUMABLE = 16 * 2**20  # bytes; larger objects are sent in pieces of this size, and only a failed piece is repeated
_TIMEOUT = aiohttp.ClientTimeout(total=600, sock_connect=20, sock_read=60)  # seconds, for one request
_NOT_SATISFIABLE = 416  # a range that begins at the end or after it


@dataclass(frozen=True)
class Stamp:
    """Size, generation and MD5 of an object. The MD5 is empty for objects that were composed of others."""

    size: int
    generation: str
    md5: bytes


class GcsBlobs(ObjectBlobs):
    """`Blobs` in a bucket. All methods may be called from any thread: gcsfs runs the requests on its own loop."""

    def __init__(self, root: str) -> None:
        """Objects below `bucket/prefix`. This makes no request."""
        with _failures(root):
            filesystem = gcsfs.GCSFileSystem(use_listings_cache=False, requests_timeout=_TIMEOUT)
        super().__init__(filesystem, root.strip("/"), guard=_failures)
        self._bucket = self._root.partition("/")[0]

    def create(self, key: str, data: bytes) -> None:
        """Write a new object (ifGenerationMatch=0). FileExistsError: the object exists with other bytes."""
        with _failures(key):
            try:
                if len(data) >= RESUMABLE:
                    self._fs.pipe_file(self._path(key), data, mode="create", chunksize=RESUMABLE, consistency="md5")
                else:
                    _check(key, data, self._upload(key, data, "0"))
            except FileExistsError:
                if not _is(data, self._about(key)):
                    raise

    def replace(self, key: str, old: bytes, new: bytes) -> bool:
        """Replace the generation of an object that holds the bytes `old`."""
        with _failures(key):
            try:
                now, generation = self._read(key)
                if now != old:
                    return now == new
                _check(key, new, self._upload(key, new, generation))
            except FileNotFoundError:
                return False
            except FileExistsError:
                return _is(new, self._about(key))
            return True

    def read_range(self, key: str, start: int, length: int) -> bytes:
        with _failures(key):
            try:
                return bytes(self._fs.cat_file(self._path(key), start=start, end=start + length)) if length else b""
            except HttpError as error:
                if error.code == _NOT_SATISFIABLE:
                    return b""
                raise

    def signed_url(self, key: str, seconds: int) -> str:
        """A V4 signed URL, valid for 7 days at most. OSError: the credentials contain no signing key."""
        with _failures(key):
            if not isinstance(self._fs.credentials.credentials, Signing):
                raise OSError(
                    "these Google credentials cannot sign URLs: use a service account's "
                    "(GOOGLE_APPLICATION_CREDENTIALS=<its key file>)"
                )
            return str(self._fs.sign(self._path(key), expiration=seconds, version="v4"))

    def size(self, key: str) -> int:
        with _failures(key):
            return int(self._about(key)["size"])

    def stamp(self, key: str) -> Stamp:
        """The stamp that identifies an object's current content. FileNotFoundError: there is no such object."""
        with _failures(key):
            about = self._about(key)
            return Stamp(int(about["size"]), str(about["generation"]), base64.b64decode(about.get("md5Hash", "")))

    def remove(self, key: str, old: bytes | None = None) -> bool:
        """Remove an object; with `old`, only the generation with these bytes."""
        with _failures(key):
            only: dict[str, str] = {}
            try:
                if old is not None:
                    now, generation = self._read(key)
                    if now != old:
                        return False
                    only = {"ifGenerationMatch": generation}
                self._fs.call("DELETE", "b/{}/o/{}", self._bucket, self._name(key), **only)
            except (FileNotFoundError, FileExistsError):
                return False
            return True

    def written_at(self, prefix: str) -> datetime | None:
        """When an object directly below `prefix` was last written, by the service's clock."""
        with _failures(prefix):
            try:
                entries = self._fs.ls(self._path(prefix), detail=True)
            except FileNotFoundError:
                return None
        times = [entry["mtime"] for entry in entries if "mtime" in entry]
        return max(times).astimezone(UTC) if times else None

    def _upload(self, key: str, data: bytes, generation: str) -> Mapping[str, Any]:
        """Upload in one request, with the bytes as its body.

        gcsfs's own upload uses a fixed multipart boundary, and truncates data that contains the boundary.
        """
        _, answer = self._fs.call(
            "POST",
            self._fs.base.replace("/storage/v1/", "/upload/storage/v1/") + f"b/{self._bucket}/o",
            uploadType="media",
            name=self._name(key),
            ifGenerationMatch=generation,
            headers={"Content-Type": "application/octet-stream"},
            data=_Body(data),
        )
        return dict(json.loads(answer))

    def _read(self, key: str) -> tuple[bytes, str]:
        """An object's bytes and their generation."""
        headers, data = self._fs.call("GET", self._fs.url(self._path(key)))
        return bytes(data), str(headers["X-Goog-Generation"])

    def _about(self, key: str) -> Mapping[str, Any]:
        return dict(self._fs.call("GET", "b/{}/o/{}", self._bucket, self._name(key), json_out=True))

    def _name(self, key: str) -> str:
        """The object's name in its bucket."""
        return self._path(key).partition("/")[2]


class _Body(io.BytesIO):
    """The body of a request, which can be read again for a retry."""

    def close(self) -> None:
        """Do nothing: aiohttp closes a body after its request, and gcsfs may send it again."""


def _is(data: bytes, about: Mapping[str, Any]) -> bool:
    """Whether the object with the metadata `about` contains the bytes `data`."""
    return (
        int(about["size"]) == len(data)
        and about.get("md5Hash") == base64.b64encode(hashlib.md5(data).digest()).decode()
    )


def _check(key: str, data: bytes, about: Mapping[str, Any]) -> None:
    if not _is(data, about):
        raise OSError(
            f"{key} has {about['size']} bytes with MD5 {about.get('md5Hash')} after writing {len(data)} bytes"
        )


@contextmanager
def _failures(key: str) -> Iterator[None]:
    """Raise the exceptions of gcsfs and of its libraries as OSErrors."""
    try:
        yield
    except OSError:  # FileNotFoundError and FileExistsError keep their meaning, and 403 is raised as a plain OSError
        raise
    except (HttpError, ChecksumError, GoogleAuthError, aiohttp.ClientError, ValueError, RuntimeError) as error:
        raise OSError(f"{key}: {type(error).__name__}: {error}") from error
