"""Images in requests: their pixels, and previously uploaded files.

Requests may name images by the location of an uploaded file. An accepted request is stored with the file's bytes, so
later changes of the file do not affect it.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from tinkerflow.backend.core.errors import UserError, broken
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.spec.limits import MAX_REQUEST_PIXEL_BYTES
from tinkerflow.backend.wire import tinker_pb2 as pb

LOCATIONS = "tinker://assets/"  # the prefix of a location
LOCATION_RULE = "the location of an image that this project uploaded (POST /api/v1/assets)"
FindFiles = Callable[[Sequence[str]], Mapping[str, bytes]]  # files by location; unknown locations are omitted


def check_room(pixel_bytes: int, field: str, up_to: str) -> None:
    """Raise UserError if the images of a request take too many bytes. field: their field. up_to: the last image."""
    if pixel_bytes > MAX_REQUEST_PIXEL_BYTES:
        raise UserError(
            f"{field} has images of more than {MAX_REQUEST_PIXEL_BYTES} bytes of pixels up to {up_to}, as the model "
            f"takes them: must be at most {MAX_REQUEST_PIXEL_BYTES}"
        )


def pixels(image: pb.ImageChunk, name: str, processor: ImageProcessor) -> npt.NDArray[np.uint8]:
    """The pixels of an image in protobuf, from `ImageProcessor.read`. UserError: the image is invalid."""
    if image.HasField("override_dimensions"):
        asked = f"{image.override_dimensions.width} x {image.override_dimensions.height}"
        raise broken(f"{name}.override_dimensions", asked, "absent: the model's processor sets the size of images")
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return processor.read(image.data, image.format, name, expected)


def pixels_of(chunk: Mapping[str, Any], name: str, processor: ImageProcessor, *, blank: bool) -> npt.NDArray[np.uint8]:
    """The pixels of an image in JSON, from `ImageProcessor.read`. UserError: the image is invalid.

    chunk: its data in base64, its format, and optionally expected_tokens. name: the chunk's name, for errors.
    processor: the model's processor. blank: see `ImageProcessor.read`.
    """
    data, expected = chunk.get("data"), chunk.get("expected_tokens")
    kind: Any = chunk.get("format")
    if not isinstance(data, str):
        raise broken(f"{name}.data", data, "the file's bytes in base64")
    if expected is not None and (not isinstance(expected, int) or isinstance(expected, bool)):
        raise broken(f"{name}.expected_tokens", expected, "a whole number")
    try:
        file = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise UserError(f"{name}.data is not base64: {error}") from error
    return processor.read(file, kind, name, expected, blank=blank)
