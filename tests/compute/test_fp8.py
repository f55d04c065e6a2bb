"""FP8 weights: values as in torch, and a folder in DeepSeek V3's layout."""

from __future__ import annotations

import json
import shutil

import jax
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.compute.conftest import SHAPE, random_model

from tinkerflow.backend.catalog.merging import merge
from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.compute.mesh import make_mesh
from tinkerflow.backend.compute.models.families import load_config, parse_config
from tinkerflow.backend.compute.models.params import load_params
from tinkerflow.backend.compute.models.peft_names import modules, pair_names
from tinkerflow.backend.compute.weights.fp8 import dequantized
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import AdapterState, LoraSpec

BITS = torch.tensor(np.arange(256, dtype=np.uint8)).view(torch.float8_e4m3fn)
KEPT = ("embed", "norm", "lm_head", "bias")


def in_blocks(matrix: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The matrix in FP8, its scales, and torch's dequantized blocks."""
    scales = (torch.rand(*(-(-size // 128) for size in matrix.shape)) * 3 + 0.1).to(dtype)
    blocks, plain = torch.empty(matrix.shape, dtype=torch.float8_e4m3fn), torch.empty(matrix.shape)
    for row, column in np.ndindex(*scales.shape):
        here = (slice(128 * row, 128 * row + 128), slice(128 * column, 128 * column + 128))
        blocks[here] = (matrix[here] / scales[row, column].float()).to(torch.float8_e4m3fn)
        plain[here] = blocks[here].float() * scales[row, column].float()
    return blocks, scales, plain


def test_fp8_values_equal_torch():
    found = dequantized(BITS.view(torch.uint8).numpy().reshape(2, 128), np.ones((1, 1), np.float32))
    np.testing.assert_array_equal(found.reshape(-1), BITS.float().numpy())


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A model with partial blocks, in FP8 and in float32."""
    torch.manual_seed(1)
    shape = {**SHAPE, "hidden_size": 160, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 144}
    plain, packed = tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("packed")
    random_model("qwen3", {**shape, "tie_word_embeddings": False}).save_pretrained(plain)
    tensors, quantized = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        if any(part in name for part in KEPT):
            quantized[name] = tensor
            continue
        dtype = torch.bfloat16 if "k_proj" in name else torch.float32  # Qwen3's, and DeepSeek V3's
        quantized[name], quantized[f"{name}_scale_inv"], tensors[name] = in_blocks(tensor, dtype)
    save_file(tensors, plain / "model.safetensors")
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]}
    (packed / "config.json").write_text(json.dumps(config))
    save_file(quantized, packed / "model.safetensors")
    for folder in (plain, packed):
        (folder / "tokenizer.json").write_text("{}")
    return plain, packed, quantized


@pytest.mark.parametrize("weights", ["full", "int8"])
def test_a_published_folder_is_loaded(folders, weights):
    plain, packed, _ = folders
    cfg, mesh = load_config(packed), make_mesh(1, 1)
    found, wanted = (load_params(cfg, one, mesh, "float32", base_weights=weights) for one in (packed, plain))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    assert ModelCard.load(str(packed)).parameters == ModelCard.load(str(plain)).parameters


CHANNELS = {"weights": {"type": "float", "num_bits": 8, "strategy": "channel"}, "targets": ["Linear"]}
COMPRESSED = {"quant_method": "compressed-tensors", "format": "float-quantized", "config_groups": {"group_0": CHANNELS}}


@pytest.mark.parametrize(
    ("config", "end", "shape", "inputs"),
    [
        ({"quant_method": "fp8", "weight_block_size": None}, "_scale_inv", lambda rows: (), "activation_scale"),
        ({"quant_method": "fp8", "activation_scheme": "static"}, "_scale", lambda rows: (1,), "input_scale"),
        (COMPRESSED, "_scale", lambda rows: (rows, 1), ""),
    ],
)
def test_a_scale_for_each_matrix_or_row_is_loaded_and_merged(folders, tmp_path, config, end, shape, inputs):
    """Ministral 3's files, vLLM's, and those of compressed-tensors."""
    plain, packed, _ = folders
    torch.manual_seed(2)
    tensors, quantized = load_file(plain / "model.safetensors"), {}
    for name, tensor in tensors.items():
        quantized[name] = tensor
        if any(part in name for part in KEPT):
            continue
        scales = (torch.rand(shape(len(tensor))) * 3 + 0.1).to(torch.bfloat16 if "k_proj" in name else torch.float32)
        quantized[name] = (tensor / scales.float()).to(torch.float8_e4m3fn)
        quantized[f"{name}{end}"] = scales
        tensors[name] = quantized[name].float() * scales.float()
        if inputs:
            quantized[name.replace("weight", inputs)] = torch.tensor(0.5)
    wide, narrow = tmp_path / "wide", tmp_path / "narrow"
    for folder, saved in ((wide, tensors), (narrow, quantized)):
        shutil.copytree(packed, folder)
        save_file(saved, folder / "model.safetensors")
    values = json.loads((packed / "config.json").read_text())
    (narrow / "config.json").write_text(json.dumps(values | {"quantization_config": config}))
    cfg, mesh = load_config(narrow), make_mesh(1, 1)
    found, wanted = (load_params(cfg, folder, mesh, "float32") for folder in (narrow, wide))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)
    assert ModelCard.load(str(narrow)).parameters == ModelCard.load(str(plain)).parameters
    spec = LoraSpec(1, train_mlp=False, train_unembed=False)
    weights = {
        name: np.zeros(shape, np.float32)
        for module, each in modules(cfg, spec).items()
        for name, shape in zip(pair_names(module), ((1, each.inputs), (each.outputs, 1)), strict=True)
    }
    merge(narrow, AdapterState(spec, 0, weights), tmp_path / "merged")
    assert "quantization_config" not in json.loads((tmp_path / "merged" / "config.json").read_text())
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert torch.equal(merged[name], tensor if any(part in name for part in KEPT) else tensor.bfloat16())


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"config_groups": {"group_0": {"weights": {**CHANNELS["weights"], "num_bits": 4}}}},
            r"\('float', 4, 'channel'",
        ),
        ({"config_groups": {"group_0": {"weights": {**CHANNELS["weights"], "strategy": "block"}}}}, r"8, 'block'\)"),
        ({"transform_config": {"config_groups": {}}}, "transform_config .* is not supported"),
    ],
)
def test_other_compressed_tensors_are_refused(folders, change, said):
    values = json.loads((folders[1] / "config.json").read_text())
    with pytest.raises(UserError, match=said):
        parse_config(values | {"quantization_config": COMPRESSED | change}, name="m")


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda scales: scales[:1],
            r"'{}_scale_inv' is F32 of shape \(1, 2\); must be F32 or BF16 of shape \(2, 2\), a scale",
        ),
        (lambda scales: scales.half(), r"'{}_scale_inv' is F16 of shape"),
        (lambda scales: None, r"'{}' is F8_E4M3; supported"),
    ],
)
def test_scales_that_do_not_fit_are_named(folders, tmp_path, change, said):
    _, packed, quantized = folders
    name = "model.layers.0.mlp.gate_proj.weight"
    changed = {**quantized, f"{name}_scale_inv": change(quantized[f"{name}_scale_inv"])}
    save_file({key: value for key, value in changed.items() if value is not None}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=said.format(name.replace(".", r"\."))):
        load_params(load_config(packed), tmp_path, make_mesh(1, 1), "float32")
