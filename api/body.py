"""Request bodies: read whole, bounded before and after decompression."""

from __future__ import annotations

import asyncio

import zstandard
from fastapi import Request

from tinkerflow.backend.errors import BodyTooLargeError, UserError

_DRAINED = 4  # times the limit: so much of a body that is too large is still read, so that its sender hears why
_MAX_WINDOW = 2**27  # bytes of history a zstd frame may ask for


async def read_body(request: Request, limit: int) -> bytes:
    """The body, decompressed; UserError when it has more than `limit` bytes, or is not what its headers say.

    What exceeds the limit is read and thrown away: most clients only listen once they have sent all of it.
    """
    parts, size = [], 0
    async for part in request.stream():
        size += len(part)
        if size <= limit:
            parts.append(part)
        else:
            parts.clear()
            if size > limit * _DRAINED:
                break
    if size > limit:
        raise BodyTooLargeError(f"the request body has more than {limit} bytes: must be at most that (max_body_bytes)")
    body = b"".join(parts)
    encoding = request.headers.get("content-encoding", "identity").lower()
    if encoding == "identity":
        return body
    if encoding != "zstd":
        raise UserError(f"Content-Encoding is {encoding!r}: must be zstd or absent")
    return await asyncio.to_thread(_decompress, body, limit)


def _decompress(body: bytes, limit: int) -> bytes:
    """The content of the one zstd frame that `body` is; it must declare its size, or a frame cut short would pass."""
    try:
        size = zstandard.get_frame_parameters(body).content_size
        if size == zstandard.CONTENTSIZE_UNKNOWN:
            raise UserError("the request body is a zstd frame that does not declare its content size: it must")
        if size > limit:
            raise BodyTooLargeError(
                f"the request body has {size} bytes when decompressed: must be at most {limit} (max_body_bytes)"
            )
        decompressor = zstandard.ZstdDecompressor(max_window_size=_MAX_WINDOW)
        return decompressor.decompress(body, max_output_size=limit, allow_extra_data=False)
    except zstandard.ZstdError as e:
        raise UserError(f"the request body must be one whole zstd frame, as its Content-Encoding says: {e}") from e
