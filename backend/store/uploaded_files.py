"""Files of uploads and images, stored in numbered pieces until a request uses them."""

from __future__ import annotations

from tinkerflow.backend.core.errors import NotFoundError
from tinkerflow.backend.spec.checkpoint import UPLOADS
from tinkerflow.backend.store.blobs import Blobs
from tinkerflow.backend.store.failures import store_errors


class UploadedFiles:
    """The uploaded files in a store. Each attempt to upload a file has a name, which its pieces share."""

    def __init__(self, url: str, blobs: Blobs) -> None:
        """blobs: contain the files. url: identifies the store in messages."""
        self._url, self._blobs = url, blobs

    def write_piece(self, upload_id: str, name: str, number: int, data: bytes) -> None:
        """Store piece `number` of a file. name: the name of this attempt."""
        with store_errors(self._url, f"write a piece of upload {upload_id}"):
            self._blobs.create(_key(upload_id, name, number), data)

    def read_file(self, upload_id: str, name: str, count: int) -> bytes:
        """Join the `count` pieces of a file. NotFoundError: a piece is missing."""
        with store_errors(self._url, f"read upload {upload_id}"):
            try:
                return b"".join(self._blobs.read(_key(upload_id, name, number)) for number in range(count))
            except FileNotFoundError as error:
                raise NotFoundError(f"upload {upload_id!r}: its files no longer exist; begin a new upload") from error

    def remove_attempt(self, upload_id: str, name: str) -> None:
        """Remove the pieces of one attempt to upload a file."""
        folder = f"{UPLOADS}/{upload_id}"
        with store_errors(self._url, f"remove upload {upload_id}"):
            for piece in self._blobs.children(folder):
                if piece.startswith(f"{name}."):
                    self._blobs.remove(f"{folder}/{piece}")

    def remove_upload(self, upload_id: str) -> None:
        with store_errors(self._url, f"remove upload {upload_id}"):
            self._blobs.remove_folder(f"{UPLOADS}/{upload_id}")


def _key(upload_id: str, name: str, number: int) -> str:
    return f"{UPLOADS}/{upload_id}/{name}.{number:05d}"
