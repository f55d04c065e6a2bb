"""A refused chunk fails the future of its request with an error that names it, and the next request works."""

from __future__ import annotations

import socket
from typing import Any

import pytest
import tinker
from tests.compat.conftest import TOKENS, datum
from tests.compat.refused import REFUSED
from tinker import types

PNG = b"\x89PNG\r\n\x1a\n"
CHUNKS = {
    "types.ImageChunk": types.ImageChunk(data=PNG, format="png", expected_tokens=2),
    "types.ImageAssetPointerChunk": types.ImageAssetPointerChunk(location="", format="png", expected_tokens=2),
    "types.DmelChunk": types.DmelChunk(dmel=bytes([0, 2, 2, 80]) + bytes(160)),  # int8 [2, 80]
}


def test_every_refused_chunk_type_is_tested() -> None:
    assert CHUNKS.keys() == REFUSED.keys()


@pytest.mark.parametrize("name", REFUSED)
def test_refused_chunk_types_are_named_in_the_error(name: str, trainer: tinker.TrainingClient, sampler: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as nobody:
        nobody.setblocking(False)
        chunk = CHUNKS[name]
        if name == "types.ImageAssetPointerChunk":
            chunk = chunk.model_copy(update={"location": f"http://127.0.0.1:{nobody.getsockname()[1]}/cat.png"})
        mixed = types.ModelInput(chunks=[types.EncodedTextChunk(tokens=TOKENS[:4]), chunk])
        with pytest.raises(tinker.RequestFailedError, match=rf"prompt.chunks\[1\].type is '?{chunk.type}'?: must be"):
            sampler.compute_logprobs(mixed).result()
        with pytest.raises(BlockingIOError):
            nobody.accept()  # a connection would wait here: the server fetches no image
    if name != "types.ImageAssetPointerChunk":  # the SDK itself refuses to train on pointers
        wanted = types.Datum(model_input=mixed, loss_fn_inputs=datum().loss_fn_inputs)
        with pytest.raises(tinker.RequestFailedError, match=rf"data\[0\].model_input.chunks\[1\] is {chunk.type}:"):
            trainer.forward([wanted], "cross_entropy").result()
    assert len(sampler.compute_logprobs(datum().model_input).result()) == len(TOKENS)
    trainer.forward([datum()], "cross_entropy").result()
