"""Weights of every family, from one file or several. Errors name tensors that are missing, unknown or do not fit."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import jax
import numpy as np
import pytest
import torch
from safetensors.numpy import load_file, save_file

from tinkerflow.backend.compute.mesh import WEIGHTS, make_mesh
from tinkerflow.backend.compute.models.families import (
    family_of,
    layer_input_tensors,
    layer_tensors,
    layers_with,
    load_config,
    parse_config,
    projections,
    registered,
)
from tinkerflow.backend.compute.models.params import by_layer, count, load_params, params_like
from tinkerflow.backend.compute.models.peft_names import targets
from tinkerflow.backend.compute.models.vision_config import tower_tensors
from tinkerflow.backend.compute.weights.files import open_tensors
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import LoraSpec

_STORED = ("e_score_correction_bias", "layer_scalar")  # transformers' buffers that files contain


def load(folder, dtype="float32", **changes):
    """The folder's weights, loaded with changes to its config."""
    fields = json.loads((folder / "config.json").read_text()) | changes
    return load_params(parse_config(fields, name=str(folder)), folder, make_mesh(1, 1), dtype)


def same(one, other) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True))


def test_every_parameter_is_loaded_and_counted(reference):
    params = load(reference.folder)
    skipped = family_of(load_config(reference.folder)).skipped  # the vision tower
    named = [(name, each) for name, each in reference.model.named_parameters() if not name.startswith(skipped)]
    named += [each for each in reference.model.named_buffers() if each[0].endswith(_STORED)]
    assert count(params) == sum(each.numel() for _, each in named)
    layers = getattr(reference.model.model, "language_model", reference.model.model).layers
    last = layers[layers_with(load_config(reference.folder))["o"][-1]]
    assert np.array_equal(params.layers["o"][-1], last.self_attn.o_proj.weight.detach().numpy())
    mlp = layers[1].mlp
    if hasattr(mlp, "down_proj") and params.layers["down"].ndim == 3:  # Gemma 4 may have experts in addition
        assert np.array_equal(params.layers["down"][1], mlp.down_proj.weight.detach().numpy())


@pytest.mark.parametrize("base_weights", ["full", "int8", "nf4"])
def test_abstract_parameters_match_loaded_ones_in_shape_dtype_and_sharding(reference, base_weights):
    config, mesh = load_config(reference.folder), make_mesh(1, 1)
    loaded = load_params(config, reference.folder, mesh, "bfloat16", base_weights=base_weights)
    like = params_like(config, mesh, "bfloat16", base_weights=base_weights)
    described = [jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype, leaf.sharding), tree) for tree in (loaded, like)]
    assert described[0] == described[1]


@pytest.mark.parametrize("reference", [f"{family}-untied" for family in registered()], indirect=True)
def test_parameter_names_and_shapes_match_the_checkpoint(reference):
    cfg = load_config(reference.folder)
    family, wanted = family_of(cfg), {}
    stored = family.unpack(cfg, open_tensors(reference.folder, "m"))
    for matrix in projections(cfg).values():
        for place in np.ndindex(matrix.stack):
            wanted[f"{matrix.name(place)}.weight"] = (matrix.outputs, matrix.inputs)
    tower = tower_tensors(cfg.vision, cfg.hidden) if cfg.vision is not None else {}
    for tensor in (*layer_tensors(cfg).values(), *tower.values()):
        layers = range(cfg.layers) if tensor.layers is None else tensor.layers
        wanted |= {tensor.tensor.format(layer): tensor.shape for layer in layers}
    wanted |= {
        family.names.embed: (cfg.vocab, cfg.hidden),
        family.names.final_norm: (cfg.hidden,),
        **dict(layer_input_tensors(cfg).values()),
    }
    held = {name: array.shape for name, array in stored.items() if not name.startswith(family.skipped)}
    assert held == wanted
    modules = dict(reference.model.named_modules())  # transformers fuses the experts of a layer
    for matrix in projections(cfg).values():
        place = tuple(size - 1 for size in matrix.stack)
        module = matrix.name(place).split(".experts.")[0]
        assert module.replace("block_sparse_moe", "mlp") in modules  # transformers renames this tensor of MiniMax-M2


@pytest.mark.parametrize("reference", [f"{family}-untied" for family in registered()], indirect=True)
def test_each_lora_switch_adapts_some_matrices(reference):
    switches = ("train_attn", "train_mlp", "train_unembed")
    for cfg in (load_config(reference.folder), replace(load_config(reference.folder), tied=True)):
        attention, mlp, unembed = (
            set(targets(cfg, LoraSpec(4, **{name: name == switch for name in switches}))) for switch in switches
        )
        assert attention and mlp and unembed == {"unembed"}
        assert sorted([*attention, *mlp, *unembed]) == sorted(projections(cfg))


def test_a_matrix_is_split_over_all_axes_where_a_device_computes_a_part_by_itself(qwen3):
    config = load_config(qwen3.folder)  # 4 heads of 8, 2 key-value heads, a hidden size of 32
    whole, none = WEIGHTS, None

    def axes(fsdp, tensor, name):
        mesh = jax.sharding.AbstractMesh((1, tensor, fsdp), ("expert", "tensor", "fsdp"))
        params = params_like(config, mesh, "float32")
        return tuple((params.layers | {"embed": params.embed_VD})[name].sharding.spec)

    assert [axes(2, 2, name) for name in ("q", "k", "up")] == [(none, whole, none)] * 3
    assert [axes(2, 2, name) for name in ("o", "down")] == [(none, none, whole)] * 2
    assert axes(2, 2, "embed") == (whole, none)
    assert axes(3, 2, "q") == (none, "tensor", none), "the devices do not divide it"


def test_several_files_are_one_model(qwen3, tmp_path):
    qwen3.model.save_pretrained(tmp_path, max_shard_size="20KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert same(load(tmp_path), load(qwen3.folder))


def test_bfloat16_files_and_weights(qwen3, tmp_path):
    copy.deepcopy(qwen3.model).to(torch.bfloat16).save_pretrained(tmp_path)
    assert same(load(tmp_path, "bfloat16"), load(qwen3.folder, "bfloat16"))
    assert load(tmp_path, "bfloat16").embed_VD.dtype == "bfloat16"


def test_a_tensor_that_does_not_fit_is_named(qwen3, tmp_path):
    with pytest.raises(UserError, match=r"tensor 'lm_head\.weight' is missing"):
        load(qwen3.folder, tie_word_embeddings=False)
    with pytest.raises(UserError, match=r"'model\.layers\.2\.self_attn\.q_proj\.weight' is missing"):
        load(qwen3.folder, num_hidden_layers=3, layer_types=None)
    with pytest.raises(UserError, match=r"has shape \(64, 32\); config\.json asks for shape \(80, 32\)"):
        load(qwen3.folder, intermediate_size=80)
    with pytest.raises(UserError, match="its safetensors cannot be read"):
        load_params(load_config(qwen3.folder), tmp_path, make_mesh(1, 1), "float32")


def test_tensor_unknown_to_the_model_is_named(qwen3, tmp_path):
    tensors = load_file(qwen3.folder / "model.safetensors")
    (tmp_path / "config.json").write_text((qwen3.folder / "config.json").read_text())
    bias = np.zeros(32, np.float32)
    save_file(tensors | {"model.layers.1.self_attn.q_proj.bias": bias}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=r"'model\.layers\.1\.self_attn\.q_proj\.bias' is not part of this Qwen3 model"):
        load(tmp_path)
    buffers = {
        "model.layers.0.self_attn.rotary_emb.inv_freq": bias,
        "lm_head.weight": tensors["model.embed_tokens.weight"],
    }
    save_file(tensors | buffers, tmp_path / "model.safetensors")
    assert same(load(tmp_path), load(qwen3.folder))


def test_layers_of_their_own_are_views_of_the_stack(qwen3):
    config = load_config(qwen3.folder)
    params = load(qwen3.folder)
    split = by_layer(config, params)
    assert isinstance(split.layers, tuple)
    assert by_layer(config, split) is split
    for number, layer in enumerate(split.layers):
        for name, stacked in params.layers.items():
            whole = np.asarray(stacked)
            part = np.asarray(layer[name])
            np.testing.assert_array_equal(part, whole[number])
            if part.nbytes % 64 == 0:  # XLA's alignment of addresses
                assert part.ctypes.data == whole[number].ctypes.data, name
