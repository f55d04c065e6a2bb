"""Published configs of hybrid models, and memory plans on real devices."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from tests.compute.conftest import SHAPE, build

from tinkerflow.backend.catalog.model_card import ModelCard
from tinkerflow.backend.compute.models.families import parse_config, projections
from tinkerflow.backend.compute.models.layers import Attention, GatedDeltaNet
from tinkerflow.backend.compute.planning import memory_plan
from tinkerflow.backend.compute.platforms import CUDA, compiling_for
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import GroupConfig

GB = 10**9
QWEN3_5_9B: dict[str, Any] = {
    "model_type": "qwen3_5",
    "tie_word_embeddings": False,
    "image_token_id": 248056,
    "vision_config": {
        "model_type": "qwen3_5",
        "deepstack_visual_indexes": [],
        "depth": 27,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": 1152,
        "in_channels": 3,
        "intermediate_size": 4304,
        "num_heads": 16,
        "num_position_embeddings": 2304,
        "out_hidden_size": 4096,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    },
    "text_config": {
        "model_type": "qwen3_5_text",
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "head_dim": 256,
        "hidden_act": "silu",
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_value_head_dim": 128,
        "max_position_embeddings": 262144,
        "num_attention_heads": 16,
        "num_hidden_layers": 32,
        "num_key_value_heads": 4,
        "rms_norm_eps": 1e-6,
        "vocab_size": 248320,
        "rope_parameters": {
            "mrope_interleaved": True,
            "mrope_section": [11, 11, 10],
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
    },
}


def changed(**fields: Any) -> dict[str, Any]:
    return QWEN3_5_9B | {"text_config": QWEN3_5_9B["text_config"] | fields}


def test_text_model_is_loaded_from_a_vision_model():
    cfg = parse_config(QWEN3_5_9B, name="m")
    assert (cfg.architecture, cfg.layers, cfg.tied, cfg.norm.plus_one) == ("qwen3_5", 32, False, True)
    assert cfg.delta == GatedDeltaNet(
        hidden=4096, key_heads=16, value_heads=32, key_dim=128, value_dim=128, taps=4, fused=False, norm_eps=1e-6
    )
    assert isinstance(cfg.attentions[0], Attention) and cfg.attentions[0].gated
    assert cfg.numbers("attention") == tuple(range(3, 32, 4))
    assert (cfg.ropes[0].theta, cfg.ropes[0].dims) == (1e7, 64)
    assert (
        8.9e9
        < sum(one.inputs * one.outputs * (one.stack[0] if one.stack else 2) for one in projections(cfg).values())
        < 9e9
    )


def test_types_of_layers_may_be_listed():
    types = ["linear_attention", "full_attention"] * 16
    assert parse_config(changed(layer_types=types), name="m").numbers("delta") == tuple(range(0, 32, 2))


def test_model_card_counts_loaded_parameters_and_reads_nested_stop_tokens(tmp_path):
    model = build(tmp_path, "qwen3_5", tied=False).model
    values = json.loads((tmp_path / "config.json").read_text())
    values["text_config"]["eos_token_id"] = 7
    values.pop("eos_token_id", None)
    (tmp_path / "config.json").write_text(json.dumps(values))
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    (tmp_path / "tokenizer.json").write_text("{}")
    card = ModelCard.load(str(tmp_path))
    assert (card.parameters, card.eos_token_ids) == (sum(each.numel() for each in model.parameters()), (7,))
    assert card.vocab_size == SHAPE["vocab_size"]


def test_a_9b_hybrid_trains_and_samples_on_one_h100_and_states_are_counted():
    cfg = parse_config(QWEN3_5_9B, name="m")
    config = GroupConfig(
        "m", dtype="bfloat16", fsdp=1, tensor=1, max_context=32768, microbatch_tokens=0, sample_slots=64,
        decode_chunk=16, compile_cache_dir="",
    )  # fmt: skip
    with compiling_for(CUDA):
        plan = memory_plan.plan_memory(cfg, config, 73 * GB)
        few = memory_plan.plan_memory(cfg, replace(config, sample_slots=16), 73 * GB)
        with pytest.raises(UserError, match="fewer TINKERFLOW_SAMPLE_SLOTS"):
            memory_plan.plan_memory(cfg, replace(config, sample_slots=600), 73 * GB)
    assert plan.context >= 8192 and plan.uses is not None and plan.uses.total <= 73 * GB
    assert plan.states == 1 + 64 + 16 + 10 + 32 and few.states == 1 + 16 + 16 + 10 + 8
    one = 24 * (4 * 32 * 128 * 128 + 2 * 3 * 8192)  # a matrix for each head, and three inputs of the convolution
    taken = 2 * 16 * one  # of a piece of prompts, before and after it; decode changes states in their pool
    assert plan.uses.kv_cache - plan.pages * 8 * 2 * 4 * 256 * 128 * 2 >= plan.states * one + taken
    with compiling_for(CUDA):
        assert memory_plan._state_bytes(cfg, config) == plan.states * one + taken
    assert (few.context, few.pages) > (plan.context, plan.pages)  # memory that fewer states free
    on_cpus = memory_plan.plan_group(cfg, config)
    pages = on_cpus.pages * memory_plan._page_bytes(cfg, config)
    assert (
        on_cpus.by_use(cfg, config)["kv_cache"] - pages == memory_plan._state_bytes(cfg, config) >= on_cpus.states * one
    )


def test_states_are_split_as_the_cache_is():
    """Heads are split as far as tensor divides the key-value heads. Sequences are split over the other devices."""
    cfg = parse_config(QWEN3_5_9B, name="m")  # 4 key-value heads, 16 key heads, 32 value heads
    config = GroupConfig(
        "m", dtype="bfloat16", fsdp=1, tensor=1, max_context=32768, microbatch_tokens=0, sample_slots=64,
        decode_chunk=16, compile_cache_dir="",
    )  # fmt: skip
    whole, split, wider = (memory_plan._state_bytes(cfg, replace(config, tensor=tensor)) for tensor in (1, 16, 32))
    assert wider < split < whole / 10
