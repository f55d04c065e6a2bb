"""Locations of uploaded images are replaced by the images' bytes, and nothing else in a request changes."""

from __future__ import annotations

import base64

import orjson
import pytest

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.wire import tinker_pb2 as pb
from tinkerflow.backend.wire import with_files, with_files_to_train

FILES = {"tinker://assets/asset-1": b"\x89PNG one"}


def find(locations):
    return {location: FILES[location] for location in locations if location in FILES}


def test_own_image_pointers_get_data_and_foreign_ones_none():
    text = {"type": "encoded_text", "tokens": [1]}
    good = {"type": "image_asset_pointer", "location": "tinker://assets/asset-1", "format": "png", "data": "mine"}
    chunks = [text, good, {**good, "location": "/etc/passwd"}, {**good, "location": 7}, "odd"]
    values = {"prompt": {"chunks": chunks}, "num_samples": 2}
    before = orjson.dumps(values)
    found = with_files(values, find)
    bare = {name: value for name, value in good.items() if name != "data"}
    assert found["prompt"]["chunks"] == [
        text,
        {**bare, "data": base64.b64encode(b"\x89PNG one").decode()},
        {**bare, "location": "/etc/passwd"},
        {**bare, "location": 7},
        "odd",
    ]
    assert (found["num_samples"], orjson.dumps(values)) == (2, before)


@pytest.mark.parametrize("prompt", [None, 3, {}, {"chunks": 5}, {"chunks": [{"type": "image", "data": "x"}]}])
def test_prompts_without_images_are_unchanged(prompt):
    values = {"prompt": prompt}
    assert with_files(values, find) is values


def test_training_images_get_their_data_and_a_missing_one_is_named():
    request = pb.ForwardBackwardRequest(model_id="m", seq_id=3)
    chunks = request.data.add().model_input
    chunks.add().encoded_text.tokens = b"tinker://assets/asset-1"  # not an image: unchanged
    chunks.add().image.data = b"tinker://assets/asset-1"
    chunks.add().image.data = b"\x89PNG two"
    found = pb.ForwardBackwardRequest.FromString(with_files_to_train(request.SerializeToString(), find))
    assert [chunk.image.data for chunk in found.data[0].model_input] == [b"", b"\x89PNG one", b"\x89PNG two"]
    chunks[1].image.data = b"\x89PNG one"
    assert found == request
    chunks[2].image.data = b"tinker://assets/asset-2"
    with pytest.raises(
        UserError, match=r"data\[0\].model_input.chunks\[2\].data is 'tinker://assets/asset-2': must be the"
    ):
        with_files_to_train(request.SerializeToString(), find)
    for other in (b"nothing", b"\xff no protobuf with tinker://assets/"):
        assert with_files_to_train(other, find) is other
