"""The card of a base model, read from a folder with tiny weights, and errors for invalid files."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.core.errors import UserError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 10,
    "hidden_size": 4,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": False,
    "eos_token_id": 7,
}
Make = Callable[..., Path]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """make(config, files): a model folder. config: changes to config.json. files: more files; None removes a file."""

    def make_folder(config: dict[str, Any] | None = None, files: dict[str, str | None] | None = None) -> Path:
        folder = tmp_path / "org" / "team" / "model"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps(CONFIG | (config or {})))
        (folder / "tokenizer.json").write_text("{}")
        tensors = {
            "model.embed_tokens.weight": np.zeros((10, 4), np.float32),
            "lm_head.weight": np.zeros((10, 4), np.float32),
        }
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        for name, content in (files or {}).items():
            path = folder / name
            path.unlink() if content is None else path.write_text(content)
        return folder

    return make_folder


def test_a_folder(make: Make) -> None:
    folder = make()
    assert ModelCard.load(str(folder)) == ModelCard(
        name=str(folder),
        path=str(folder),
        tokenizer_id=str(folder),
        architecture="llama",
        vocab_size=10,
        max_context=32768,
        eos_token_ids=(7,),
        parameters=80,
        tied=False,
    )


def test_a_relative_folder_keeps_the_name_that_was_given(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make()
    monkeypatch.chdir(folder.parent)
    card = ModelCard.load("model")
    assert (card.name, card.path, card.tokenizer_id) == ("model", str(folder), str(folder))


def test_json_comes_back(make: Make) -> None:
    card = ModelCard.load(str(make()))
    assert ModelCard.from_json(card.to_json()) == card


@pytest.mark.parametrize("text", ["{}", "[]", "3", "{", '{"name": "x"}'])
def test_json_of_another_kind_is_refused(text: str) -> None:
    with pytest.raises(ValueError):
        ModelCard.from_json(text)


@pytest.mark.parametrize(("wanted", "found"), [(0, 32768), (100, 100), (131072, 131072)])
def test_max_context(make: Make, wanted: int, found: int) -> None:
    assert ModelCard.load(str(make()), max_context=wanted).max_context == found


def test_context_longer_than_the_model_allows_is_refused(make: Make) -> None:
    with pytest.raises(UserError, match="max_context 131073; the model allows at most 131072"):
        ModelCard.load(str(make()), max_context=131073)


def test_a_short_model(make: Make) -> None:
    assert ModelCard.load(str(make({"max_position_embeddings": 64}))).max_context == 64


@pytest.mark.parametrize(
    ("generation", "found"),
    [
        ('{"eos_token_id": [1, 2]}', (1, 2)),
        ('{"eos_token_id": 0}', (0,)),
        ("{}", (7,)),
        ('{"eos_token_id": null}', (7,)),
    ],
)
def test_generation_config_lists_the_stop_tokens(make: Make, generation: str, found: tuple[int, ...]) -> None:
    assert ModelCard.load(str(make(files={"generation_config.json": generation}))).eos_token_ids == found


def test_missing_eos_is_accepted(make: Make) -> None:
    assert ModelCard.load(str(make({"eos_token_id": None}))).eos_token_ids == ()


def test_a_tied_head_is_counted_once(make: Make) -> None:
    card = ModelCard.load(str(make({"tie_word_embeddings": True})))
    assert (card.parameters, card.tied) == (40, True)


def test_sharded_weights_are_counted(make: Make) -> None:
    folder = make()
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    save_file({"x": np.zeros(5, np.float32)}, folder / "b.safetensors")
    index = {"weight_map": {"lm_head.weight": "a.safetensors", "x": "b.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert ModelCard.load(str(folder)).parameters == 85


@pytest.mark.parametrize(
    ("config", "files", "message"),
    [
        ({"model_type": "gpt2"}, {}, "model_type 'gpt2'; supported: "),
        ({}, {"config.json": "{"}, "config.json cannot be read as JSON"),
        ({}, {"config.json": "[]"}, "contains a list, not an object"),
        ({}, {"config.json": None}, "config.json cannot be read"),
        ({}, {"tokenizer.json": None}, "has no tokenizer.json"),
        ({"eos_token_id": 10}, {}, r"eos_token_id 10 in config.json; must be ids in 0\.\.9"),
        ({}, {"generation_config.json": '{"eos_token_id": "x"}'}, "eos_token_id 'x' in generation_config.json"),
        ({}, {"model.safetensors": None, "model.safetensors.index.json": "{}"}, "no object 'weight_map'"),
    ],
)
def test_invalid_input_is_named_in_the_error(
    make: Make, config: dict[str, Any], files: dict[str, str | None], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        ModelCard.load(str(make(config, files)))


@pytest.mark.parametrize("weights", [b"", b"\xff" * 16, b"\2" + b"\0" * 7 + b"[]", None])
def test_damaged_weights_are_named(make: Make, weights: bytes | None) -> None:
    folder = make()
    if weights is None:
        (folder / "model.safetensors").unlink()
    else:
        (folder / "model.safetensors").write_bytes(weights)
    with pytest.raises(UserError, match=r"model\.safetensors"):
        ModelCard.load(str(folder))


@pytest.mark.parametrize("name", ["", "/nowhere/at/all", "./nowhere", "~/no-such-folder", "a/b/c"])
def test_folder_path_is_not_looked_up_on_the_hub(name: str) -> None:
    with pytest.raises(UserError, match="base model"):
        ModelCard.load(name)


@pytest.mark.parametrize(("name", "message"), [("org/model", "the hub cannot be reached"), ("a b!", "nor a hub id")])
def test_offline_error_names_the_hub(tmp_path: Path, name: str, message: str) -> None:
    code = (
        "import sys\nfrom tinkerflow.backend.catalog.model_card import ModelCard\n"
        "from tinkerflow.backend.core.errors import UserError\n"
        "try: ModelCard.load(sys.argv[1])\nexcept UserError as error: print(error)"
    )
    out = subprocess.run(
        [sys.executable, "-c", code, name],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
        env={**os.environ, "HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path)},
    )
    assert f"base model {name!r}" in out.stdout
    assert message in out.stdout
