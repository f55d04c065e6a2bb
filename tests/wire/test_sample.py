"""Decoding of sample requests, and errors that name invalid content."""

from __future__ import annotations

import base64
import io
import json
import re
from typing import Any

import numpy as np
import pytest
from PIL import Image

from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Adjustments, PromptWishes, SampleRequest
from tinkerflow.backend.spec.images import ImageProcessor
from tinkerflow.backend.wire import NumSamples, SampleBody, images, parse, sample_request, with_seed


def body(params: dict[str, Any] | None = None, prompt: Any = (1, 2, 3), **more: Any) -> bytes:
    chunks = [{"type": "encoded_text", "tokens": list(prompt)}]
    given = {"temperature": 1.0, "top_k": -1, "top_p": 1.0, "seed": 5, **(params or {})}
    return json.dumps({"prompt": {"chunks": chunks}, "sampling_params": given, "num_samples": 1, **more}).encode()


def targets(data: Any, shape: Any = (2, 1), dtype: str = "int64", crow: Any = None, cols: Any = (0,)) -> bytes:
    tensor = {"data": data, "dtype": dtype, "shape": list(shape)}
    if crow is not None:
        tensor |= {"sparse_crow_indices": crow, "sparse_col_indices": list(cols)}
    return body(target_prompt_logprobs=tensor)


def decode(payload: bytes, **more: Any) -> SampleRequest:
    context = {"request_id": "r", "owner": "o", "vocab_size": 100, "max_context": 64, "eos": (9,), **more}
    return sample_request(SampleBody.decode(payload), **context)


def test_defaults() -> None:
    request = decode(body())
    assert request.prompt_T.dtype == np.int32
    assert request.prompt_T.tolist() == [1, 2, 3]
    assert (request.request_id, request.owner, request.snapshot_id) == ("r", "o", None)
    assert (request.num_samples, request.max_tokens) == (1, 61)
    assert (request.temperature, request.top_k, request.top_p, request.seed) == (1.0, -1, 1.0, 5)
    assert (request.stop_tokens, request.stop_strings, request.prompt_logprobs) == ((9,), (), False)


@pytest.mark.parametrize(
    "wish",
    [
        {"prompt_logprobs": True},
        {"topk_prompt_logprobs": 3},
        {"prompt_alt_tokens_k": 2},
        {"target_prompt_logprobs": {"data": [1] * 63, "dtype": "int64", "shape": [63, 1]}},
        {"prompt_logprobs": True, "prompt_logprobs_last_n": 63},
    ],
    ids=lambda wish: " ".join(wish),
)
@pytest.mark.parametrize("params", [{}, {"max_tokens": 1}])
def test_a_prompt_that_fills_the_context_can_be_scored(wish: Any, params: Any) -> None:
    request = decode(body(params, prompt=[1] * 64, **wish))
    assert (len(request.prompt_T), request.max_tokens) == (64, 1)


@pytest.mark.parametrize(
    ("stop", "tokens", "strings"),
    [
        (None, (9,), ()),
        ([], (), ()),
        ("x", (), ("x",)),
        (["x", "yz"], (), ("x", "yz")),
        ([4, 5], (4, 5), ()),
    ],
)
def test_stop_absent_is_eos_and_an_empty_list_is_nothing(stop: Any, tokens: Any, strings: Any) -> None:
    request = decode(body({"stop": stop} if stop is not None else {}))
    assert (request.stop_tokens, request.stop_strings) == (tokens, strings)


@pytest.mark.parametrize(("stop", "tokens", "strings"), [(None, (9, 7), ()), (["x"], (7,), ("x",)), ([4], (4, 7), ())])
def test_stop_token_ids_are_added_to_other_stops(stop: Any, tokens: Any, strings: Any) -> None:
    request = decode(body({"stop_token_ids": [7]} | ({"stop": stop} if stop is not None else {})))
    assert (request.stop_tokens, request.stop_strings) == (tokens, strings)


def test_chunks_are_joined_and_no_chunk_type_means_text() -> None:
    values = json.loads(body())
    values["prompt"]["chunks"] = [{"tokens": [1]}, {"type": "encoded_text", "tokens": [2, 3]}]
    assert decode(json.dumps(values).encode()).prompt_T.tolist() == [1, 2, 3]


@pytest.mark.parametrize(("seed", "kept"), [(0, 0), (2**64 - 1, 2**64 - 1), (-1, 2**64 - 1), (7.0, 7)])
def test_seeds_of_64_bits(seed: Any, kept: int) -> None:
    assert decode(body({"seed": seed})).seed == kept


def seeded(payload: bytes) -> Any:
    values = parse(payload)
    stored = json.loads(with_seed(payload, values))
    assert values == json.loads(payload), "the hashed values are unchanged"
    return stored


def test_missing_seed_is_drawn_once() -> None:
    without = json.dumps({"prompt": {"chunks": []}, "sampling_params": {"temperature": 0.0}}).encode()
    first, second = seeded(without), seeded(without)
    assert 0 <= first["sampling_params"]["seed"] < 2**64
    assert first["sampling_params"] != second["sampling_params"]
    assert with_seed(body(), parse(body())) == body()
    assert seeded(b"{}")["sampling_params"]["seed"] >= 0
    with pytest.raises(UserError, match="seed is None: must be drawn before"):
        decode(body({"seed": None}))


def test_deeply_nested_body_is_a_user_error() -> None:
    deep = b'{"sampling_params": {}, "x": ' + b"[" * 900 + b"]" * 900 + b"}"
    with pytest.raises(UserError, match="nests lists and objects too deeply: must be at most 254 deep"):
        parse(deep)
    most = b'{"sampling_params": {}, "x": ' + b"[" * 253 + b"]" * 253 + b"}"
    assert parse(with_seed(most, parse(most)))["x"] == parse(most)["x"]


def test_sample_count_is_read_without_parsing_the_rest() -> None:
    assert NumSamples.from_values({}).num_samples == 1
    assert NumSamples.from_values({"num_samples": 4}).num_samples == 4


def test_prompt_options_are_read() -> None:
    assert decode(body()).prompt is None
    request = decode(
        body(prompt_logprobs=True, prompt_logprobs_last_n=2, topk_prompt_logprobs=3, prompt_alt_tokens_k=4)
    )
    assert request.prompt == PromptWishes(last_n=2, top=3, targets_TK=None, alternatives=4)
    assert decode(body(topk_sample_logprobs=7)).topk_sample == 7
    dense, sparse = decode(targets([5, -1])).prompt, decode(targets([7], [2, 3], crow=[0, 0, 1], cols=[2])).prompt
    assert dense is not None and dense.targets_TK is not None and dense.targets_TK.tolist() == [[5], [-1]]
    assert sparse is not None and sparse.targets_TK is not None
    assert sparse.targets_TK.tolist() == [[-1, -1, -1], [-1, -1, 7]]
    assert SampleBody.decode(body(record_stability_info=True)).record_stability_info
    assert not SampleBody.decode(body()).record_stability_info


def test_sampling_options_beyond_the_sdk_are_read() -> None:
    plain = decode(body())
    assert (plain.min_p, plain.adjustments) == (0.0, None)
    for nothing in ({"min_p": None, "logit_bias": {}}, {"presence_penalty": 0, "logit_bias": {"3": 0}}):
        assert decode(body(nothing)).adjustments is None
    asked = {"presence_penalty": 1, "frequency_penalty": -2, "repetition_penalty": 1.5, "logit_bias": {"9": 1, "3": -4}}
    request = decode(body({"min_p": 0.25, **asked}))
    assert request.min_p == 0.25
    assert (plain.priority, decode(body(priority="interactive")).priority) == ("batch", "interactive")
    assert request.adjustments == Adjustments(1.0, -2.0, 1.5, ((3, -4.0), (9, 1.0)))


WRONG = [
    (body(priority="high"), "priority is 'high': must be 'interactive' or 'batch'"),
    (body(priority=["batch"]), "priority is ['batch']: must be 'interactive' or 'batch'"),
    (body({"min_p": 1.5}), "sampling_params.min_p is 1.5: must be a finite number >= 0 and <= 1"),
    (
        body({"presence_penalty": 2.5}),
        "sampling_params.presence_penalty is 2.5: must be a finite number >= -2 and <= 2",
    ),
    (body({"frequency_penalty": "x"}), "sampling_params.frequency_penalty is 'x': must be a finite number >= -2"),
    (body({"repetition_penalty": 0}), "sampling_params.repetition_penalty is 0: must be a finite number >= 0.01"),
    (body({"logit_bias": [1]}), "sampling_params.logit_bias is [1]: must be a JSON object"),
    (
        body({"logit_bias": {"100": 1}}),
        "sampling_params.logit_bias has the key '100': must have token ids alone, >= 0 and < 100",
    ),
    (body({"logit_bias": {"-1": 1}}), "sampling_params.logit_bias has the key '-1': must have token ids"),
    (body({"logit_bias": {"²": 1}}), "sampling_params.logit_bias has the key '²': must have token ids"),
    (body({"logit_bias": {"7" * 9999: 1}}), "must have token ids"),
    (body({"logit_bias": {"7": 101}}), "sampling_params.logit_bias['7'] is 101: must be a number from -100 to 100"),
    (body({"logit_bias": {"7": None}}), "sampling_params.logit_bias['7'] is None: must be a number from -100 to 100"),
    (body({"logit_bias": {"7": 1, "07": 1}}), "sampling_params.logit_bias names token 7 twice"),
    (body({"logit_bias": {str(i): 1 for i in range(1025)}}), "logit_bias has 1025 tokens: must have at most 1024"),
    (body(num_samples=0), "num_samples is 0: must be a whole number from 1 to 1024"),
    (body(num_samples=1025), "num_samples is 1025: must be"),
    (body(num_samples=True), "num_samples is True: must be"),
    (body({"temperature": -1}), "sampling_params.temperature is -1: must be a finite number >= 0"),
    (body({"temperature": "hot"}), "sampling_params.temperature is 'hot': must be"),
    (body({"top_k": 0}), "sampling_params.top_k is 0: must be -1 (off) or at least 1"),
    (body({"top_k": -2}), "sampling_params.top_k is -2: must be a whole number from -1"),
    (body({"top_p": 0}), "sampling_params.top_p is 0.0: must be > 0 and <= 1"),
    (body({"top_p": 1.5}), "sampling_params.top_p is 1.5: must be a finite number >= 0 and <= 1"),
    (body({"seed": 2**64}), "sampling_params.seed is 18446744073709551616: must be a whole number"),
    (body({"seed": "a"}), "sampling_params.seed is 'a': must be a whole number"),
    (body({"max_tokens": 0}), "sampling_params.max_tokens is 0: must be a whole number from 1"),
    (
        body({"max_tokens": 62}),
        "sampling_params.max_tokens is 62: must be at most 61, the rest of the context of 64 tokens",
    ),
    (body({"stop": ["a", 1]}), "sampling_params.stop is ['a', 1]: must be non-empty strings only, or token ids only"),
    (body({"stop": [""]}), "sampling_params.stop is ['']: must be non-empty strings"),
    (body({"stop": ""}), "sampling_params.stop is ['']: must be"),
    (body({"stop": [100]}), "sampling_params.stop[0] is 100: must be >= 0 and < 100, the model's vocabulary"),
    (body({"stop": {"a": 1}}), "sampling_params.stop is {'a': 1}: must be a string, or at most 256"),
    (body({"stop": [1] * 257}), "must be a string, or at most 256 strings or token ids"),
    (body(prompt=[]), "prompt has 0 tokens: must be 1 to 63, the model's context less one"),
    (body(prompt=[1] * 64), "prompt has 64 tokens: must be 1 to 63"),
    (body(prompt=[1, 100]), "prompt.chunks[0].tokens[1] is 100: must be >= 0 and < 100"),
    (body(prompt=[1, -1]), "prompt.chunks[0].tokens[1] is -1: must be"),
    (body(prompt=[True]), "prompt.chunks[0].tokens is [True]: must be a flat list of whole numbers"),
    (body(prompt=[1, True]), "prompt.chunks[0].tokens is [1, True]: must be a flat list of whole numbers"),
    (body({"stop": [True, 1]}), "sampling_params.stop is [True, 1]: must be"),
    (body(prompt=[1] * 65, prompt_logprobs=True), "prompt has 65 tokens: must be 1 to 64, the model's context"),
    (
        body({"max_tokens": 2}, prompt=[1] * 64, prompt_logprobs=True),
        "sampling_params.max_tokens is 2: must be at most 1, the prompt fills the context and can only be scored",
    ),
    (body(prompt=[1.5]), "prompt.chunks[0].tokens is [1.5]: must be a flat list of whole numbers"),
    (body(prompt=["a"]), "prompt.chunks[0].tokens is ['a']: must be"),
    (body(prompt=[[1], [1, 2]]), "prompt.chunks[0].tokens is [[1], [1, 2]]: must be a flat list"),
    (body(topk_prompt_logprobs=101), "topk_prompt_logprobs is 101: must be a whole number from 0 to 100"),
    (body(topk_sample_logprobs=-1), "topk_sample_logprobs is -1: must be a whole number from 0"),
    (body(prompt_alt_tokens_k=129), "prompt_alt_tokens_k is 129: must be a whole number from 0 to 128"),
    (body(prompt_logprobs_last_n=1), "prompt_logprobs_last_n is 1: must be absent without prompt_logprobs"),
    (body(prompt_logprobs_last_n=3, prompt_logprobs=True), "prompt_logprobs_last_n is 3: must be 1 to 2, the prompt's"),
    (body(prompt_logprobs_last_n=0, prompt_logprobs=True), "prompt_logprobs_last_n is 0: must be 1 to 2"),
    (targets([1, 2], dtype="float32"), "target_prompt_logprobs.dtype is 'float32': must be 'int64'"),
    (targets([1, 2, 3], shape=[3, 1]), "target_prompt_logprobs.shape is [3, 1]: must be [2, K], the prompt's length"),
    (targets([1, 2], shape=[2]), "target_prompt_logprobs.shape is [2]: must be [T, K]"),
    (targets([1], shape=[2, 129]), "target_prompt_logprobs.shape is [2, 129]: must be [2, K]"),
    (targets([1]), "target_prompt_logprobs.data has 1 values: the shape [2, 1] needs 2"),
    (targets([1, 100]), "target_prompt_logprobs.data[1] is 100: must be -1 (nothing) or a token, >= 0 and < 100"),
    (targets([1, -2]), "target_prompt_logprobs.data[1] is -2: must be"),
    (targets([1, 2.5]), "target_prompt_logprobs.data is [1, 2.5]: must be a flat list of whole numbers"),
    (targets([1], crow=[0, 2, 1]), "sparse_crow_indices must be 3 numbers from 0 to 1 that never fall"),
    (targets([1], crow=[0, 0, 1], cols=[1]), "sparse_col_indices must be 1 numbers, >= 0 and < 1"),
    (targets([1, 1], crow=[0, 2, 2], cols=[0, 0]), "sparse_col_indices must rise strictly within each row"),
    (body({"stop": "x" * 1025}), "must be strings of at most 1024 characters"),
    (body({"max_tokens": 10**6}), "sampling_params.max_tokens is 1000000: must be at most 61"),
    (b"[]", "the request body is []: must be a JSON object"),
    (b"{", "the request body is not JSON"),
    (b"{}", "prompt.chunks is None: must be a list of chunks"),
    (b'{"prompt": 3}', "prompt is 3: must be a JSON object"),
    (b'{"prompt": {"chunks": [{"type": "image"}]}}', "prompt.chunks[0].type is 'image': must be encoded_text"),
    (b'{"prompt": {"chunks": [{"type": "image_asset_pointer", "location": "/etc/passwd"}]}}', "accepts no images"),
    (
        b'{"prompt": {"chunks": [{"type": "dmel"}]}}',
        "'dmel': must be encoded_text, because the model accepts",
    ),
    (b'{"prompt": {"chunks": [7]}}', "prompt.chunks[0].type is 7: must be encoded_text"),
    (b'{"prompt": {"chunks": [{}]}}', "prompt.chunks[0].tokens is None: must be a list of token ids"),
]


@pytest.mark.parametrize(("payload", "text"), WRONG, ids=[w[1][:40] for w in WRONG])
def test_invalid_content_is_named(payload: bytes, text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        decode(payload)


SEES = ImageProcessor(token=99, side=8, least=64, most=1024, mean=(0.0,) * 3, deviation=(1.0,) * 3)


def picture(colour: int = 7, **more: Any) -> dict[str, Any]:
    out = io.BytesIO()
    Image.new("RGB", (24, 16), (colour, 0, 0)).save(out, "png")
    return {"type": "image", "format": "png", "data": base64.b64encode(out.getvalue()).decode(), **more}


@pytest.mark.parametrize(
    ("params", "recorded"),
    [
        ({"top_p": 0.9}, True),
        ({"top_k": 5}, True),
        ({"min_p": 0.1}, True),
        ({}, False),
        ({"top_p": 0.9, "temperature": 0}, False),
    ],
)
def test_supports_are_recorded_of_requests_that_filter(params: dict[str, Any], recorded: bool) -> None:
    assert decode(body(params), supports=True).supports is recorded
    assert not decode(body(params)).supports


def seen(*chunks: Any, blank: bool = False) -> SampleRequest:
    given = [{"type": "encoded_text", "tokens": [1, 2]} if chunk == "text" else chunk for chunk in chunks]
    payload = json.dumps({"prompt": {"chunks": given}, "sampling_params": {"seed": 1}}).encode()
    return decode(payload, max_context=32, blank=blank, processor=lambda: SEES)


def test_an_image_is_its_placeholders_and_its_pixels() -> None:
    request = seen("text", picture(), "text", picture(9, expected_tokens=6))
    assert request.prompt_T.tolist() == [1, 2, *[99] * 6, 1, 2, *[99] * 6]
    assert [image.start for image in request.images] == [2, 10]
    assert [image.pixels_HWC[..., 0].tolist() for image in request.images] == [[[7] * 24] * 16, [[9] * 24] * 16]
    blank = seen("text", picture(), blank=True)
    assert blank.images[0].pixels_HWC.shape == (16, 24, 3) and not blank.images[0].pixels_HWC.any()


@pytest.mark.parametrize(
    ("chunk", "text"),
    [
        (picture(expected_tokens=5), "prompt.chunks[1].expected_tokens is 5: must be 6"),
        (picture(expected_tokens=True), "prompt.chunks[1].expected_tokens is True: must be a whole number"),
        (picture(data="a*"), "prompt.chunks[1].data is not base64"),
        (picture(data=None), "prompt.chunks[1].data is None: must be the file's bytes in base64"),
        (picture(format=["png"]), "prompt.chunks[1].format is ['png']: must be png or jpeg"),
        ({"type": "dmel"}, "prompt.chunks[1].type is 'dmel': must be encoded_text or image"),
        ("image", "prompt.chunks[1].data is None"),
    ],
)
def test_invalid_images_are_named(chunk: Any, text: str) -> None:
    for blank in (False, True):
        with pytest.raises(UserError, match=re.escape(text)):
            seen("text", chunk, blank=blank)


def test_too_long_or_too_many_images_are_not_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    never = {"type": "image", "format": "png", "data": "AAAA"}
    with pytest.raises(UserError, match="prompt has at least 36 tokens: must be 1 to 31, the model's context less one"):
        seen(*[picture()] * 6, never)
    monkeypatch.setattr(images, "MAX_REQUEST_PIXEL_BYTES", 2 * 3 * 16 * 24)
    with pytest.raises(UserError, match=r"more than 2304 bytes of pixels up to prompt.chunks\[2\]"):
        seen(*[picture()] * 3, never)
