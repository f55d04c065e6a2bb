"""A published gpt-oss folder, with experts in MXFP4, gives the same model as in transformers."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.compute.conftest import Reference, add_adapter, ask, build, examples, forward, gradients, result_of
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.layers import EXPERT_MATRICES
from tinkerflow.backend.compute.models.params import count, load_params, params_like
from tinkerflow.backend.compute.weights.mxfp4 import dequantized
from tinkerflow.backend.core.errors import UserError


def drawn(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and scales of matrices [*shape[:-1], 32 * shape[-1]]."""
    blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
    return blocks, rng.integers(118, 126, shape).astype(np.uint8)


def test_mxfp4_values_equal_transformers():
    blocks, scales = drawn(np.random.default_rng(0), 6, 4)
    wanted = convert_moe_packed_tensors(torch.tensor(blocks)[None], torch.tensor(scales)[None], dtype=torch.float32)
    np.testing.assert_array_equal(dequantized(blocks, scales), wanted[0].T.numpy())


def published(plain, packed):
    """Write a random model in plain numbers and with experts in MXFP4, and return the tensors of the second.

    A row of hidden (32) is 1 block, and a row of mlp (64) is 2 blocks.
    """
    build(plain, "gpt_oss", tied=False)
    rng = np.random.default_rng(1)
    tensors = load_file(plain / "model.safetensors")
    quantized = {name: array for name, array in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    for name in sorted(set(tensors) - set(quantized)):
        experts, inputs, outputs = tensors[name].shape
        blocks, scales = drawn(rng, experts, outputs, inputs // 32)
        quantized |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        tensors[name] = np.ascontiguousarray(whole.numpy())
    packed.mkdir()
    (packed / "config.json").write_text((plain / "config.json").read_text())
    save_file(quantized, packed / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    return quantized


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_folder_is_loaded(tmp_path, dtype):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    quantized = published(plain, packed)
    cfg, mesh = load_config(plain), make_mesh(1, 1)
    found, wanted = (load_params(cfg, folder, mesh, dtype) for folder in (packed, plain))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    del quantized["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(quantized, packed / "model.safetensors")
    with pytest.raises(UserError, match=r"'model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight' is missing"):
        load_params(cfg, packed, mesh, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stay_packed_and_are_computed_back_without_a_difference(tmp_path, dtype):
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    published(plain, packed)
    cfg, mesh = load_config(plain), make_mesh(1, 1)
    found, wanted = load_params(cfg, packed, mesh, dtype, base_weights="mxfp4"), load_params(cfg, plain, mesh, dtype)
    assert count(found) == count(wanted)
    for name, array in wanted.layers.items():
        one = found.layers[name]
        if name in EXPERT_MATRICES:
            assert one.packed.nbytes * 2 == array.size
            one = one.dense(array.dtype, of_experts=True)
        np.testing.assert_array_equal(one, array)
    like = params_like(cfg, mesh, dtype, base_weights="mxfp4")
    shapes = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree) for tree in (found, like)]
    assert shapes[0] == shapes[1]
    with pytest.raises(UserError, match=r"mlp\.experts.+ is not in MXFP4 in the files"):
        load_params(cfg, plain, mesh, dtype, base_weights="mxfp4")


def test_mxfp4_is_refused_for_models_without_it(qwen3):
    with pytest.raises(UserError, match="base_weights is 'mxfp4'; must be 'full', 'int8' or 'nf4'"):
        load_params(load_config(qwen3.folder), qwen3.folder, make_mesh(1, 1), "float32", base_weights="mxfp4")


def test_training_and_samples_of_mxfp4_equal_plain_weights(tmp_path):
    folders = tmp_path / "plain", tmp_path / "packed"
    published(*folders)
    executors = [
        Reference(folder, None).executor(base_weights=kind)
        for folder, kind in zip(folders, ("full", "mxfp4"), strict=True)
    ]
    for one in executors:
        add_adapter(one, "a")
    wanted, found = (forward(one, "a", examples((7, 33)), backward=True) for one in executors)
    for a, b in zip(found.logprobs, wanted.logprobs, strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)
    slopes, others = (gradients(one, "a") for one in executors)
    for name, gradient in slopes.items():
        assert np.abs(others[name] - gradient).max() <= 1e-4 * max(1.0, np.abs(gradient).max()), name
    prompt = examples((20,))[0].tokens_T
    texts = [result_of(one, ask("a", prompt, 6)).sequences[0].tokens_T.tolist() for one in executors]
    assert texts[0] == texts[1]
