"""Frequencies of every rope_type against transformers' own functions."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.ministral3.modeling_ministral3 import get_llama_4_attn_scale

from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.models.rope import rope_frequencies
from tinkerflow.backend.compute.models.rotary import rope_table

FIELDS: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 100,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": 512,
}
PHI = FIELDS | {"model_type": "phi3"}  # a family that can rotate a part of each head
LONG = {"short_factor": [1 + i / 40 for i in range(16)], "long_factor": [2 + i for i in range(16)]}
CASES: dict[str, dict[str, Any]] = {
    "default": {"rope_type": "default", "rope_theta": 5e5},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "yarn": {"rope_type": "yarn", "factor": 16.0, "original_max_position_embeddings": 64},
    "yarn of Ministral": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 64,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "mscale": 1.0,
        "mscale_all_dim": 0.5,
    },
    "yarn of gpt-oss": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 64,
        "truncate": False,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "rope_theta": 150000.0,
    },
    "yarn told how": {
        "rope_type": "yarn",
        "factor": 4.0,
        "attention_factor": 1.25,
        "original_max_position_embeddings": 128,
    },
    "longrope": {"rope_type": "longrope", "original_max_position_embeddings": 64, **LONG},
    "longrope with factors": {
        "rope_type": "longrope",
        "factor": 3.0,
        "attention_factor": 1.1,
        "original_max_position_embeddings": 64,
        **LONG,
    },
    "proportional": {"rope_type": "proportional", "factor": 2.0, "partial_rotary_factor": 0.25},
    "linear in part": {"rope_type": "linear", "factor": 2.0, "partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("context", [64, 512])
def test_rope_frequencies_equal_transformers(case, context):
    values = {"rope_theta": 10000.0, **CASES[case]}
    fields = PHI if case == "linear in part" else FIELDS
    rope = parse_config(fields | {"rope_parameters": values}, name="m").for_context(context).ropes[0]
    config = transformers.LlamaConfig(**{**FIELDS, "rope_parameters": dict(values)})
    if case == "default":
        wanted, attention = 1 / 5e5 ** (torch.arange(0, 32, 2) / 32), 1.0
    else:
        wanted, attention = ROPE_INIT_FUNCTIONS[values["rope_type"]](config, "cpu", seq_len=context)
    np.testing.assert_allclose(rope_frequencies(rope), wanted.numpy(), rtol=2e-6)
    assert rope.attention == pytest.approx(attention, rel=1e-12)


def test_partial_rotary_embedding_rotates_part_of_each_head():
    rope = parse_config(PHI | {"partial_rotary_factor": 0.5, "rope_theta": 1e6}, name="m").ropes[0]
    assert rope.dims == 16
    np.testing.assert_allclose(rope_frequencies(rope), 1e6 ** -(np.arange(8) / 8))


@pytest.mark.parametrize("family", ["ministral3", "mistral"])
@pytest.mark.parametrize("case", ["default", "linear", "yarn"])
def test_queries_grow_only_in_the_family_that_grows_them_in_transformers(family, case):
    values = {"llama_4_scaling_beta": 0.3, "original_max_position_embeddings": 64, **CASES[case]}
    (rope,) = parse_config(FIELDS | {"model_type": family, "rope_parameters": values}, name="m").ropes
    positions = np.arange(0, 512, 7)[None]
    lengths = [np.sqrt(cos**2 + sin**2) for cos, sin in rope_table(rope, positions)]
    wanted = get_llama_4_attn_scale(torch.tensor(positions), 0.3 if family == "ministral3" else 0.0, 64)
    np.testing.assert_allclose(lengths[0] / lengths[1], np.broadcast_to(wanted[:, 0].numpy(), lengths[0].shape), 1e-6)
