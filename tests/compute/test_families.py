"""Every registered family matches its checkpoints, and a new family needs only one file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.compute.models import families
from tinkerflow.backend.compute.models.families import (
    family_of,
    layer_input_tensors,
    layer_tensors,
    load_config,
    parse_config,
    projections,
    registered,
)
from tinkerflow.backend.compute.models.peft_names import targets
from tinkerflow.backend.compute.models.vision_config import tower_tensors
from tinkerflow.backend.compute.weights.files import open_tensors
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import CreateAdapter, ExportAdapter, LoraSpec

TOY = """
from tinkerflow.backend.compute.models.decoder import decoder, layer_count
from tinkerflow.backend.compute.models.family import Family, TensorNames
from tinkerflow.backend.compute.models.layers import MLP, Attention, DecoderLayer, RMSNorm


def toy(fields):
    norm = RMSNorm.read(fields)
    attention = Attention.read(fields, qk_norm="each head", norm=norm)
    layer = DecoderLayer(attention, MLP(fields.size("hidden_size"), fields.size("width")), norm)
    return decoder(fields, norm, [layer] * layer_count(fields))


FAMILY = Family(
    model_type="toy",
    title="Toy 1",
    parse=toy,
    names=TensorNames("decoder.", "decoder.blocks.{}.", "decoder.words.weight", "decoder.norm.weight"),
)
"""


@pytest.fixture
def toy(qwen3: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The tiny Qwen3 with the tensor names and config fields of a new family, which is one file in its own folder."""
    package, folder = tmp_path / "more families", tmp_path / "model"
    package.mkdir()
    folder.mkdir()
    (package / "toy.py").write_text(TOY)
    monkeypatch.setattr(families, "__path__", [*families.__path__, str(package)])
    registered.cache_clear()
    fields = json.loads((qwen3.folder / "config.json").read_text())
    fields |= {"model_type": "toy", "width": fields.pop("intermediate_size")}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "tokenizer.json").write_text("{}")
    names = {"model.embed_tokens": "decoder.words", "model.norm": "decoder.norm", "model.layers": "decoder.blocks"}
    tensors = load_file(qwen3.folder / "model.safetensors")
    for old, new in names.items():
        tensors = {name.replace(old, new): array for name, array in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    yield type(qwen3)(folder, qwen3.model)
    registered.cache_clear()
    sys.modules.pop("tinkerflow.backend.compute.models.families.toy", None)


def test_a_family_is_one_file(toy, qwen3, shared_executor, examples, forward):
    assert "toy" in registered()
    card, plain = ModelCard.load(str(toy.folder)), load_config(qwen3.folder)
    assert card.architecture == "toy"
    assert card.parameters == sum(parameter.numel() for parameter in qwen3.model.parameters())
    assert load_config(toy.folder) == replace(plain, architecture="toy")
    with pytest.raises(UserError, match=r"supported: .*toy"):
        parse_config({"model_type": "gpt2"}, name="m")
    executor = toy.executor()
    for each in (executor, shared_executor):
        each.execute(CreateAdapter("family", LoraSpec(4), 0))
    data = examples((7, 30))
    found, wanted = (forward(each, "family", data).logprobs for each in (executor, shared_executor))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    state = executor.execute(ExportAdapter("family", optimizer=False))
    assert "base_model.model.decoder.blocks.1.self_attn.q_proj.lora_A.weight" in state.weights


@pytest.mark.parametrize("model", sorted(registered()))
def test_parameter_names_and_shapes_match_the_checkpoint(model, tmp_path):
    from tests.compute.conftest import build

    reference = build(tmp_path, model, tied=False)
    cfg = load_config(tmp_path)
    family, wanted = family_of(cfg), {}
    stored = family.unpack(cfg, open_tensors(tmp_path, model))
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
        assert module.replace("block_sparse_moe", "mlp") in modules  # transformers renames that of MiniMax-M2


@pytest.mark.parametrize("model", sorted(registered()))
def test_each_lora_switch_adapts_some_matrices(model, tmp_path):
    from tests.compute.conftest import build

    cfg = load_config(build(tmp_path, model, tied=True).folder)
    attention, mlp, unembed = (
        set(targets(cfg, LoraSpec(4, **{name: name == switch for name in switches})))
        for switches in [("train_attn", "train_mlp", "train_unembed")]
        for switch in switches
    )
    assert attention and mlp and unembed == {"unembed"}
    assert sorted([*attention, *mlp, *unembed]) == sorted(projections(cfg))


def test_the_readme_names_every_family():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert [family.title for family in registered().values() if family.title not in text] == []
