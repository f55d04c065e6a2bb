"""Configs of both transformers generations are read, and errors name unsupported settings."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tinkerflow.backend.compute.models.families import load_config, parse_config
from tinkerflow.backend.compute.models.layers import Attention, Experts, SoftmaxRouter
from tinkerflow.backend.compute.models.rope import Llama3Rope, Rope
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
STRETCH = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}


def test_omitted_config_fields_have_defaults():
    config = parse_config(FIELDS, name="m")
    attention = config.decoder_layers[0].attention
    assert attention == Attention(hidden=32, heads=4, kv_heads=4, head_dim=8, rope=Rope(10_000.0, 8))
    assert not config.tied


def test_qwen2_has_biases_and_ignores_its_unused_window():
    window = {"use_sliding_window": False, "sliding_window": 131072, "max_window_layers": 2}
    (attention, _) = parse_config(FIELDS | window | {"model_type": "qwen2"}, name="m").attentions
    assert isinstance(attention, Attention)
    assert (attention.biases, attention.qk_norm, attention.window) == (("q", "k", "v"), "none", None)


@pytest.mark.parametrize(
    "rope",
    [{"rope_theta": 5e5, "rope_scaling": STRETCH}, {"rope_parameters": {**STRETCH, "rope_theta": 5e5}}],
    ids=["transformers 4", "transformers 5"],
)
def test_rope_is_found_where_either_generation_keeps_it(rope):
    assert parse_config(FIELDS | rope, name="m").ropes == (Rope(5e5, 8, Llama3Rope(8.0, 1.0, 4.0, 64)),)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"model_type": "mamba"}, "'mamba'"),
        ({"num_attention_heads": 0}, "num_attention_heads is 0 in config.json; must be a positive whole number"),
        ({"num_hidden_layers": None}, "num_hidden_layers is None"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        ({"hidden_size": 2}, "head_dim is 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        ({"attention_bias": True}, "attention_bias True"),
        ({"use_sliding_window": True}, "use_sliding_window True"),
        ({"rope_scaling": {"rope_type": "yarn"}}, "'yarn'"),
        ({"rope_scaling": {"rope_type": "llama3"}}, "'factor'"),
        ({"num_key_value_heads": 3}, "3 key-value heads"),
    ],
)
def test_unsupported_config_fields_are_refused(change, named):
    with pytest.raises(UserError, match=named):
        parse_config(FIELDS | change, name="m")


def test_experts():
    experts = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
    config = parse_config(FIELDS | experts, name="m")
    assert config.mixture == Experts(32, 8, 24, SoftmaxRouter(per_token=2, normalized=False))
    assert parse_config(FIELDS, name="m").experts == 0
    for change, named in (
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 of 8 experts"),
        ({"decoder_sparse_step": 2}, "decoder_sparse_step 2"),
        ({"mlp_only_layers": [0]}, r"mlp_only_layers \[0\]"),
    ):
        with pytest.raises(UserError, match=named):
            parse_config(FIELDS | experts | change, name="m")


def test_a_missing_field_and_a_broken_file_are_named(tmp_path):
    with pytest.raises(UserError, match="'vocab_size'"):
        parse_config({k: v for k, v in FIELDS.items() if k != "vocab_size"}, name="m")
    with pytest.raises(UserError, match=r"config\.json cannot be read"):
        load_config(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([1]))
    with pytest.raises(UserError, match="a list, not an object"):
        load_config(tmp_path)
