"""A gpt-oss folder as it is published, its experts in MXFP4, is the model that transformers makes of it."""

from __future__ import annotations

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file
from tests.compute.conftest import build
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.weights.mxfp4 import dequantised
from tinkerflow.backend.core.errors import UserError


def drawn(rng: np.random.Generator, *shape: int) -> tuple[np.ndarray, np.ndarray]:
    """Blocks and scales of matrices [*shape[:-1], 32 * shape[-1]]."""
    blocks = rng.integers(0, 256, (*shape, 16), np.uint8)
    return blocks, rng.integers(118, 126, shape).astype(np.uint8)


def test_numbers_are_those_of_transformers():
    blocks, scales = drawn(np.random.default_rng(0), 6, 4)
    wanted = convert_moe_packed_tensors(torch.tensor(blocks)[None], torch.tensor(scales)[None], dtype=torch.float32)
    np.testing.assert_array_equal(dequantised(blocks, scales), wanted[0].T.numpy())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_published_folder_is_loaded(tmp_path, dtype):
    """hidden 32 and mlp 64 are 1 and 2 blocks in a row."""
    plain, packed = tmp_path / "plain", tmp_path / "packed"
    build(plain, "gpt_oss", tied=False)
    cfg, mesh, rng = load_config(plain), make_mesh(1, 1), np.random.default_rng(1)
    tensors = load_file(plain / "model.safetensors")
    quantised = {name: array for name, array in tensors.items() if not name.endswith(("gate_up_proj", "down_proj"))}
    for name in sorted(set(tensors) - set(quantised)):
        experts, inputs, outputs = tensors[name].shape
        blocks, scales = drawn(rng, experts, outputs, inputs // 32)
        quantised |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        whole = convert_moe_packed_tensors(torch.tensor(blocks), torch.tensor(scales), dtype=torch.float32)
        tensors[name] = np.ascontiguousarray(whole.numpy())
    packed.mkdir()
    (packed / "config.json").write_text((plain / "config.json").read_text())
    save_file(quantised, packed / "model.safetensors")
    save_file(tensors, plain / "model.safetensors")
    found, wanted = (load_params(cfg, folder, mesh, dtype) for folder in (packed, plain))
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(a, b)
    del quantised["model.layers.1.mlp.experts.down_proj_scales"]
    save_file(quantised, packed / "model.safetensors")
    with pytest.raises(UserError, match=r"'model\.layers\.1\.mlp\.experts\.0\.down_proj\.weight' is missing"):
        load_params(cfg, packed, mesh, dtype)
