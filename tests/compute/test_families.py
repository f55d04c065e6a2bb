"""A new family needs only one file."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tests.compute.conftest import examples, forward

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.compute.models import families
from tinkerflow.backend.compute.models.families import load_config, parse_config, registered
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


def test_a_family_is_one_file(toy, qwen3, executor):
    assert "toy" in registered()
    card, plain = ModelCard.load(str(toy.folder)), load_config(qwen3.folder)
    assert card.architecture == "toy"
    assert card.parameters == sum(parameter.numel() for parameter in qwen3.model.parameters())
    assert load_config(toy.folder) == replace(plain, architecture="toy")
    with pytest.raises(UserError, match=r"supported: .*toy"):
        parse_config({"model_type": "gpt2"}, name="m")
    toys = toy.executor()
    for each in (toys, executor):
        each.execute(CreateAdapter("family", LoraSpec(4), 0))
    data = examples((7, 30))
    found, wanted = (forward(each, "family", data).logprobs for each in (toys, executor))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    state = toys.execute(ExportAdapter("family", optimizer=False))
    assert "base_model.model.decoder.blocks.1.self_attn.q_proj.lora_A.weight" in state.weights


def test_the_readme_names_every_family():
    text = (Path(__file__).parents[2] / "README.md").read_text()
    assert [family.title for family in registered().values() if family.title not in text] == []
