"""Configs as several releases of transformers write them. Needs no torch."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from tinkerflow.backend.compute.models.families import parse_config, registered
from tinkerflow.backend.compute.models.rope import LinearRope, Rope
from tinkerflow.backend.core.errors import UserError

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 128,
}


def test_a_gemma_whose_layers_are_all_of_one_type_is_read_as_transformers_writes_it():
    ropes = {"full_attention": {"rope_type": "linear", "factor": 8.0}, "sliding_attention": {"rope_type": "default"}}
    shape = FIELDS | {
        "model_type": "gemma3_text",
        "layer_types": ["full_attention"] * 2,
        "head_dim": 8,
        "num_key_value_heads": 4,
    }
    written = transformers.Gemma3TextConfig(**shape, rope_parameters={**ropes}).to_dict()
    assert written["rope_parameters"].keys() >= ropes.keys()  # releases before 5.24 write more
    assert parse_config(written, name="m").ropes == (Rope(1e6, 8, LinearRope(8.0)),)


def test_olmo3_scales_positions_only_in_layers_without_a_window() -> None:
    theta, yarn = (
        {"rope_theta": 500_000.0},
        {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 64},
    )
    shape = FIELDS | {"model_type": "olmo3", "num_hidden_layers": 4, "sliding_window": 16}
    usual = parse_config(shape | {"rope_parameters": theta | yarn}, name="m")
    ropes = {"full_attention": theta | yarn, "sliding_attention": theta | {"rope_type": "default"}}
    newer = parse_config(shape | {"rope_parameters": ropes}, name="m")  # as transformers 5.24 writes it
    assert newer == usual == parse_config(shape | theta | {"rope_scaling": yarn}, name="m")
    scaled = [layer.attention.rope.scaling is not None for layer in newer.decoder_layers]
    assert scaled == [False, False, False, True]
    with pytest.raises(UserError, match="has no field 'rope_theta'"):
        parse_config(shape, name="m")


@pytest.mark.parametrize("family", sorted(registered().keys() - {"mistral3"}))
def test_a_missing_field_has_the_default_of_transformers(family):
    """Otherwise the file must have the field. The tensors' shapes show the two fields that are left out here."""
    whole = transformers.AutoConfig.for_model(family).to_dict()
    text = whole.get("text_config", whole)
    text["head_dim"] = text.get("head_dim") or 128  # the default of some families is odd
    if whole.get("vision_config"):
        whole["vision_config"]["out_hidden_size"] = text["hidden_size"]
    expected, required = parse_config(whole, name="m"), 0
    for field in text.keys() - {"head_dim", "num_key_value_heads", "model_type"}:
        without = {key: value for key, value in text.items() if key != field}
        try:
            found = parse_config(without if text is whole else whole | {"text_config": without}, name="m")
        except UserError as error:
            required += "config.json has no field" in error.message or pytest.fail(error.message)
        else:
            assert found == expected, field
    assert required
