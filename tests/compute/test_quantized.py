"""Base weights in int8: the rounding rule, and training and decoding as in Hugging Face with rounded weights."""

from __future__ import annotations

import copy
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import add_adapter, ask, examples, forward, gradients, result_of

from tinkerflow.backend.compute.kernels.matmul import matmul
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.params import by_layer, count, load_params
from tinkerflow.backend.compute.weights.quantized import Int8, rounded, scales


def rounded_copy(model: torch.nn.Module) -> torch.nn.Module:
    """A copy of the model with the matrices of its layers rounded by rows, in torch."""
    model = copy.deepcopy(model)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "_proj." in name and weight.ndim == 2:
                scale = weight.abs().amax(1, keepdim=True) / 127
                weight.copy_((weight / scale).round().clamp(-127, 127) * scale)
    return model


@pytest.fixture(scope="module")
def by_torch(qwen3, tmp_path_factory):
    model = rounded_copy(qwen3.model)
    folder: Path = tmp_path_factory.mktemp("rounded")
    model.save_pretrained(folder)
    return type(qwen3)(folder, model)


@pytest.fixture(scope="module")
def executor(qwen3):
    return qwen3.executor(base_weights="int8")


def test_int8_values_follow_the_rounding_rule():
    rows = np.array([[0.5, -2.54, 0.03], [0, 0, 0], [127, 63.5, 62.5]], np.float32)
    scale = scales(rows, np.float32)
    np.testing.assert_allclose(scale, [0.02, 0, 1])
    values = rounded(rows, scale)
    assert values.dtype == np.int8
    assert values.tolist() == [[25, -127, 2], [0, 0, 0], [127, 64, 62]]  # halves to even
    assert np.array_equal(rounded(rows[:, 1:], scale), values[:, 1:])
    x = np.array([[1, 2, 3]], np.float32)
    meant = values * scale[:, None]
    np.testing.assert_allclose(matmul(jax.numpy.asarray(x), Int8(values, scale)), x @ meant.T, rtol=1e-6)


def test_int8_values_are_rounded_by_the_bfloat16_scale():
    rows = np.random.default_rng(0).normal(size=(8, 64)).astype(np.float32)
    scale = scales(rows, jax.numpy.bfloat16)
    assert scale.dtype == "bfloat16"
    error = np.abs(rounded(rows, scale) * scale.astype(np.float32)[:, None] - rows)
    assert (error <= scale.astype(np.float32)[:, None] * 1.01).all()


def test_int8_logprobs_and_gradients_equal_rounded_weights(qwen3, by_torch, executor):
    data = examples((7, 33))
    add_adapter(executor, "zero-and-not", train_unembed=False)
    plain = by_torch.executor()
    add_adapter(plain, "zero-and-not", train_unembed=False)
    found, wanted = (forward(one, "zero-and-not", data, backward=True) for one in (executor, plain))
    for one, other in zip(found.logprobs, wanted.logprobs, strict=True):
        close_logprobs(one, other)
    slopes = gradients(plain, "zero-and-not")
    for name, gradient in gradients(executor, "zero-and-not").items():
        assert np.abs(gradient - slopes[name]).max() < 2e-3 * max(1.0, np.abs(slopes[name]).max()), name
    # The base model alone, compared with torch. The effect of rounding is far larger than the remaining difference.
    scored = result_of(executor, ask("scored", data[0].tokens_T, 1, prompt_logprobs=True))
    torch_says = by_torch.logprobs(shifted(data[0]))[:-1, 0]
    close_logprobs(scored.prompt_logprobs_T[1:], torch_says)
    assert np.abs(qwen3.logprobs(shifted(data[0]))[:-1, 0] - torch_says).max() > 5e-3


def test_greedy_decode_of_quantized_weights_equals_hugging_face(by_torch, executor):
    prompt = examples((20,))[0].tokens_T
    (found,) = result_of(executor, ask("a", prompt, 12)).sequences
    with torch.no_grad():
        ids = torch.tensor(prompt[None].astype(np.int64))
        wanted = by_torch.model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, pad_token_id=0
        )
    assert found.tokens_T.tolist() == wanted[0, len(prompt) :].tolist()


def test_int8_matrix_takes_a_quarter_of_the_bytes_and_keeps_its_parameter_count(qwen3):
    def load(**how):
        return load_params(load_config(qwen3.folder), qwen3.folder, make_mesh(1, 1), "float32", **how)

    small, plain = load(base_weights="int8"), load()
    assert count(small) == count(plain)
    for name in ("q", "o", "gate", "down"):
        held, was = small.layers[name], plain.layers[name]
        assert held.values.nbytes * 4 == was.nbytes
        assert held.scale.shape == was.shape[:2]
    assert small.embed_VD.dtype == plain.embed_VD.dtype == "float32"
    assert (
        by_layer(load_config(qwen3.folder), small) is small
    )  # without kernels, all layers would be floats during decoding


def shifted(example):
    """The example with its own next tokens as targets."""
    return type(example)(example.tokens_T, np.roll(example.tokens_T, -1)[:, None], example.weights_TK)
