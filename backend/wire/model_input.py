"""The model input of a datum, text and images, as tokens: an image is a run of placeholders, and its pixels.

Requests may name images by the location of an uploaded file. They are stored with the bytes in place of locations, so
what happens to a file later changes none that was accepted.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from google.protobuf.message import DecodeError

from tinkerflow.backend.commands import ImagePixels, Int32
from tinkerflow.backend.errors import UserError, broken
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.spec.limits import MAX_IMAGE_TOKENS
from tinkerflow.backend.wire import tinker_pb2 as pb

LOCATIONS = "tinker://assets/"  # what a location begins with
LOCATION_RULE = "the location of an image that this project uploaded (POST /api/v1/assets)"
FindFiles = Callable[[Sequence[str]], Mapping[str, bytes]]  # files by location; what is none is left out
_TOKEN = np.dtype("<i4")


def counted_tokens(chunk: pb.Chunk) -> int:
    """About how many tokens a chunk has. Files are not opened for that: an image has what the client says, or most."""
    if chunk.WhichOneof("chunk") != "image":
        return len(chunk.encoded_text.tokens) // _TOKEN.itemsize
    said = chunk.image.expected_tokens if chunk.image.HasField("expected_tokens") else MAX_IMAGE_TOKENS
    return min(max(said, 0), MAX_IMAGE_TOKENS)


def too_many_pixels(what: str, up_to: str, most: int) -> UserError:
    """The images of a request take more than `most` bytes. what: the field that has them. up_to: the one too many."""
    return UserError(
        f"{what} has images of more than {most} bytes of pixels up to {up_to}, as the model takes them: must be at "
        f"most {most}"
    )


def model_input(
    chunks: Sequence[pb.Chunk], name: str, max_context: int, context_rule: str, processor: ImageProcessor | None
) -> tuple[Int32, tuple[ImagePixels, ...]]:
    """The tokens of an input, placeholders where it has images, and the images.

    chunks: of the input. name: how errors call it. max_context: tokens at most. context_rule: what that follows from.
    processor: of images; None when the model takes text. UserError names a chunk that the model does not take, what is
    wrong with an image, and a length that is.
    """
    parts: list[bytes] = []
    images: list[ImagePixels] = []
    size = 0  # in bytes
    for j, chunk in enumerate(chunks):
        kind, here = chunk.WhichOneof("chunk") or "empty", f"{name}.chunks[{j}]"
        if kind == "image" and processor is not None:
            _check_whole(name, size)
            image = ImagePixels(size // _TOKEN.itemsize, _pixels(chunk.image, here, processor))
            images.append(image)
            parts.append(np.full(image.tokens(processor.side), processor.token, _TOKEN).tobytes())
        elif kind == "encoded_text":
            parts.append(chunk.encoded_text.tokens)
        else:
            takes = "encoded_text" if processor is None else "encoded_text or image"
            raise UserError(f"{here} is {kind}: must be {takes}, the model takes no {kind}s")
        size += len(parts[-1])
        if images and size > max_context * _TOKEN.itemsize:  # before the next image is decoded
            rule = f"must be 1 to {max_context}, {context_rule}"
            raise UserError(f"{name} has more than {max_context} tokens up to chunks[{j}]: {rule}")
    _check_whole(name, size)
    tokens_T = np.frombuffer(parts[0] if len(parts) == 1 else b"".join(parts), _TOKEN)
    if not 0 < len(tokens_T) <= max_context:
        raise UserError(f"{name} has {len(tokens_T)} tokens: must be 1 to {max_context}, {context_rule}")
    return tokens_T, tuple(images)


def _check_whole(name: str, size: int) -> None:
    if size % _TOKEN.itemsize:
        raise UserError(f"{name} has {size} bytes of tokens: must be a multiple of 4 (int32)")


def _pixels(image: pb.ImageChunk, name: str, processor: ImageProcessor) -> npt.NDArray[np.uint8]:
    if image.HasField("override_dimensions"):
        asked = f"{image.override_dimensions.width} x {image.override_dimensions.height}"
        raise broken(f"{name}.override_dimensions", asked, "absent: the model's processor says what size images have")
    expected = image.expected_tokens if image.HasField("expected_tokens") else None
    return processor.read(image.data, image.format, name, expected)


def pixels_of(chunk: Mapping[str, Any], name: str, processor: ImageProcessor, *, blank: bool) -> npt.NDArray[np.uint8]:
    """The pixels of an image in JSON, as `ImageProcessor.read` gives them; UserError names what is wrong.

    chunk: its data in base64, its format, and maybe expected_tokens. name: how errors call it. processor: of the model.
    blank: as of `read`.
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
        raise UserError(f"{name}.data is no base64: {error}") from error
    return processor.read(file, kind, name, expected, blank=blank)


def with_files_to_train(body: bytes, find: FindFiles) -> bytes:
    """A ForwardBackwardRequest, images whose `data` is a location with their file; UserError for one without."""
    start = LOCATIONS.encode()
    if start not in body:
        return body
    try:
        request = pb.ForwardBackwardRequest.FromString(body)
    except DecodeError:
        return body  # it is told so when it is executed
    named = [
        (f"data[{i}].model_input.chunks[{j}].data", chunk.image)
        for i, datum in enumerate(request.data)
        for j, chunk in enumerate(datum.model_input)
        if chunk.WhichOneof("chunk") == "image" and chunk.image.data.startswith(start)
    ]
    if not named:
        return body
    locations = [image.data.decode(errors="replace") for _, image in named]
    files = find(locations)
    for (name, image), location in zip(named, locations, strict=True):
        if (file := files.get(location)) is None:
            raise broken(name, location, LOCATION_RULE)
        image.data = file
    return bytes(request.SerializeToString())
