"""Base weights in 4 bits: the numbers, the layout, and training and sampling as with dequantized weights.

The reference rounds the tensors of a folder in NumPy, and writes them as a folder of plain weights. CI compares one
family of each kind of layer. `pytest --families` compares all families.
"""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.numpy import save_file
from scipy.stats import norm
from tests.compiled import forget_programs
from tests.compute.closeness import close_logprobs
from tests.compute.conftest import Reference, add_adapter, ask, build, examples, forward, gradients, result_of
from tests.compute.test_parity import LENGTHS, REPRESENTATIVES, in_peft, same_gradients, scores, skip_unless

from tinkerflow.backend.compute.models.families import family_of, load_config, projections, registered
from tinkerflow.backend.compute.models.family import open_unpacked
from tinkerflow.backend.compute.platforms import CPU, CUDA, compiling_for
from tinkerflow.backend.compute.weights.files import DTYPES
from tinkerflow.backend.compute.weights.quantized import NF4, FourBit, block_of, block_scales, packed
from tinkerflow.backend.spec.commands import CreateAdapter, LoraSpec


def computed_back(matrix: np.ndarray) -> np.ndarray:
    """QLoRA's rule in float64: blocks of inputs, scaled by their largest magnitude, rounded to the nearest number."""
    blocks = matrix.astype(np.float64).reshape(-1, np.gcd(matrix.shape[1], 64))
    scale = np.abs(blocks).max(axis=1, keepdims=True)
    nearest = np.abs(blocks[..., None] / np.where(scale > 0, scale, 1)[..., None] - NF4).argmin(axis=-1)
    return (NF4[nearest] * scale).reshape(matrix.shape).astype(np.float32)


def rounded_folder(model: Reference, folder) -> None:
    """Write the model's folder with rounded matrices in plain float32. Each expert's matrix is rounded alone."""
    cfg = load_config(model.folder)
    tensors = open_unpacked(family_of(cfg), cfg, model.folder, "m")
    plain = {name: np.array(tensor.view(DTYPES[tensor.dtype])) for name, tensor in tensors.items()}
    for ours, matrix in projections(cfg).items():
        if ours != "unembed":
            for place in np.ndindex(matrix.stack):
                name = f"{matrix.name(place)}.weight"
                plain[name] = computed_back(plain[name])
    save_file(plain, folder / "model.safetensors")
    for name in ("config.json", "preprocessor_config.json"):
        if (model.folder / name).exists():
            (folder / name).write_text((model.folder / name).read_text())


@pytest.fixture(scope="module", params=registered())
def family(request, tmp_path_factory):
    """For each family: the rounded model, an executor in 4 bits, and one with the rounded weights in float32.

    Tests are skipped for a family with the same matrices as another representative.
    """
    skip_unless(REPRESENTATIVES - {"olmo2", "qwen3_moe", "qwen3_vl"}, request.param, request.config)
    model, folder = (
        build(tmp_path_factory.mktemp(request.param), request.param, tied=False),
        tmp_path_factory.mktemp("rounded"),
    )
    rounded_folder(model, folder)
    yield Reference(folder, model.model), model.executor(base_weights="nf4"), Reference(folder, None).executor()
    forget_programs()


@pytest.fixture
def compared(request):
    """Skip slow tests for all families except for a dense one and one with experts."""
    skip_unless({"qwen3", "gpt_oss"}, request.node.callspec.params["family"], request.config)


def test_numbers_are_quantiles_of_the_normal_distribution():
    """As `create_normal_map` of bitsandbytes, whose outermost quantile is midway between those of 1 / 30 and 1 / 32."""
    offset = 0.9677083
    ends = [norm.ppf(np.linspace(offset, 0.5, count)[:-1]) for count in (9, 8)]
    found = np.sort([*ends[0], 0.0, *-ends[1]])
    np.testing.assert_allclose(NF4, found / found.max(), atol=1e-6)


@pytest.mark.parametrize("inputs", [64, 192, 96, 6])
def test_four_bit_matrix_is_decoded_by_its_rule(inputs):
    rows = np.random.default_rng(0).normal(size=(10, inputs)).astype(np.float32)
    rows[3] = 0
    block = block_of(inputs)
    weight = FourBit(packed(rows, block, "float32"), block_scales(rows, block, "float32"))
    assert (weight.packed.shape, weight.packed.dtype) == ((10, inputs // 2), np.uint8)
    assert weight.size == rows.size
    np.testing.assert_allclose(weight.dense(jnp.float32), computed_back(rows), rtol=1e-6)
    turned = FourBit(weight.packed.T[None], weight.scale.T[None])
    for target in (CPU, CUDA):  # GPUs look up the numbers of experts
        with compiling_for(target):
            found = turned.dense(jnp.float32, of_experts=True)[0].T
        np.testing.assert_array_equal(found, weight.dense(jnp.float32))


def test_four_bit_values_are_rounded_by_the_bfloat16_scale():
    rows = np.random.default_rng(0).normal(size=(8, 128)).astype(np.float32)
    scale = block_scales(rows, 64, jnp.bfloat16)
    assert scale.dtype == jnp.bfloat16
    found = np.asarray(FourBit(packed(rows, 64, jnp.bfloat16), scale).dense(jnp.float32))
    wide = np.repeat(scale.astype(np.float32), 64, axis=1)
    nearest = NF4[np.abs(rows[..., None] / wide[..., None] - NF4).argmin(axis=-1)] * wide
    np.testing.assert_allclose(found, nearest, rtol=1e-6)


def test_logprobs_of_four_bit_weights_equal_rounded_weights(family):
    data, (_, packed_one, plain) = examples(LENGTHS), family
    for one in (packed_one, plain):
        add_adapter(one, "scored")
    found, wanted = (forward(one, "scored", data).logprobs for one in (packed_one, plain))
    for a, b in zip(found, wanted, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=0)


@pytest.mark.usefixtures("compared")
def test_gradients_of_four_bit_weights_equal_rounded_weights(family):
    """For adapters of all matrices, including experts, which PEFT adapts in another way."""
    data, (_, packed_one, plain) = examples(LENGTHS), family
    for one in (packed_one, plain):
        add_adapter(one, "trained")
        forward(one, "trained", data, backward=True)
    slopes = gradients(plain, "trained")
    for name, gradient in gradients(packed_one, "trained").items():
        assert np.abs(gradient - slopes[name]).max() < 1e-4 * max(1.0, np.abs(slopes[name]).max()), name


def test_four_bit_logprobs_and_gradients_equal_peft(family, tmp_path, request):
    """QLoRA: the rounded model in torch, with PEFT's adapter."""
    (model, packed_one, _), cfg = family, load_config(family[0].folder)
    rounded = model.folder
    if not request.config.getoption("--families") and cfg.architecture != "qwen3":
        pytest.skip("runs with --families")
    by_torch, info = type(model.model).from_pretrained(rounded, output_loading_info=True)
    if info["missing_keys"]:
        pytest.skip("transformers reads the experts of this family only as one tensor")
    add_adapter(packed_one, "a", train_mlp=not cfg.experts)
    data = examples(LENGTHS, targets=2)
    with in_peft(Reference(rounded, by_torch), packed_one, "a", tmp_path) as adapted:
        result, loss = forward(packed_one, "a", data, backward=True), torch.zeros(())
        for example, found in zip(data, result.logprobs, strict=True):
            scored = scores(adapted, example)
            close_logprobs(found, scored.detach().numpy())
            loss = loss - (scored * torch.tensor(example.weights_TK)).sum()
        loss.backward()
        same_gradients(gradients(packed_one, "a"), adapted)


@pytest.mark.usefixtures("compared")
def test_samples_and_scores_of_four_bit_weights_equal_rounded_weights(family):
    prompt = examples((20,))[0].tokens_T
    found, wanted = (result_of(one, ask("a", prompt, 6, prompt_logprobs=True)) for one in family[1:])
    assert found.sequences[0].tokens_T.tolist() == wanted.sequences[0].tokens_T.tolist()
    np.testing.assert_allclose(found.prompt_logprobs_T[1:], wanted.prompt_logprobs_T[1:], atol=1e-5, rtol=0)


def test_full_training_starts_from_the_unquantized_files(qwen3):
    found, wanted = (qwen3.executor(base_weights=kind) for kind in ("nf4", "full"))
    for one in (found, wanted):
        one.execute(CreateAdapter("all", LoraSpec(0), 0))
    data = examples((33,))
    for a, b in zip(*(forward(one, "all", data).logprobs for one in (found, wanted)), strict=True):
        np.testing.assert_array_equal(a, b)
