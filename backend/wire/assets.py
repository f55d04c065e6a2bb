"""Images that a request names by the location of an uploaded file: their bytes, in place of their locations.

Requests are stored with the bytes, so what happens to a file later changes none that was accepted.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from google.protobuf.message import DecodeError

from tinkerflow.backend.errors import broken
from tinkerflow.backend.wire import tinker_pb2 as pb

LOCATIONS = "tinker://assets/"  # what a location begins with
LOCATION_RULE = "the location of an image that this project uploaded (POST /api/v1/assets)"
POINTER = "image_asset_pointer"
FindFiles = Callable[[Sequence[str]], Mapping[str, bytes]]  # files by location; what is none is left out


def with_files(values: dict[str, Any], find: FindFiles) -> dict[str, Any]:
    """The values of a sample's body, pointers with the `data` of an image. Those that lead nowhere stay without."""
    prompt = values.get("prompt")
    if not isinstance(prompt, dict) or not isinstance(chunks := prompt.get("chunks"), list):
        return values
    pointers = [chunk for chunk in chunks if isinstance(chunk, dict) and chunk.get("type") == POINTER]
    if not pointers:
        return values
    files = find([location for chunk in pointers if isinstance(location := chunk.get("location"), str)])

    def filled(chunk: Any) -> Any:
        if not isinstance(chunk, dict) or chunk.get("type") != POINTER:
            return chunk
        location = chunk.get("location")
        file = files.get(location) if isinstance(location, str) else None
        bare = {name: value for name, value in chunk.items() if name != "data"}
        return bare if file is None else {**bare, "data": base64.b64encode(file).decode()}

    return {**values, "prompt": {**prompt, "chunks": [filled(chunk) for chunk in chunks]}}


def with_files_to_train(body: bytes, find: FindFiles) -> bytes:
    """A ForwardBackwardRequest, images whose `data` is a location with their file; UserError for one without."""
    start = LOCATIONS.encode()
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
    locations = [image.data.decode(errors="replace") for _, image in named]
    files = find(locations)
    for (name, image), location in zip(named, locations, strict=True):
        if (file := files.get(location)) is None:
            raise broken(name, location, LOCATION_RULE)
        image.data = file
    return bytes(request.SerializeToString()) if named else body
