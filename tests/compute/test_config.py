"""Configs of both transformers generations are read, and errors name unsupported settings."""

from __future__ import annotations

import json

import pytest
import transformers
from tests.compute.test_gemma4 import E2B
from tests.compute.test_hybrid import QWEN3_5_9B, changed
from tests.compute.test_latent import DEEPSEEK_V3, GLM_4_7_FLASH
from tests.compute.test_rope import FIELDS as ROPE
from tests.compute.test_rope import LONG
from tests.compute.test_routed import GLM_4_5_AIR, MINIMAX_M2
from tests.compute.test_written_configs import FIELDS

from tinkerflow.backend.compute.models.families import load_config, parse_config
from tinkerflow.backend.compute.models.layers import Attention, Experts, SoftmaxRouter
from tinkerflow.backend.compute.models.rope import Llama3Rope, Rope
from tinkerflow.backend.core.errors import UserError

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


def test_routing_without_groups_in_the_file_is_that_of_transformers():
    whole = transformers.AutoConfig.for_model("deepseek_v3").to_dict()
    without = {key: value for key, value in whole.items() if key not in ("n_group", "topk_group")}
    assert parse_config(without, name="m") == parse_config(whole, name="m")


def test_longrope_of_phi3_without_its_first_context_is_that_of_transformers():
    """The context decides which factors are used and how much attention grows."""
    factors = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [2.0] * 48}
    whole = transformers.AutoConfig.for_model("phi3", max_position_embeddings=131072, rope_scaling=factors).to_dict()
    without = {key: value for key, value in whole.items() if key not in ("rope_parameters", "rope_scaling")}
    del without["original_max_position_embeddings"]
    found = parse_config(without | {"rope_theta": 10000.0, "rope_scaling": factors}, name="m")
    assert found == parse_config(whole, name="m")
    assert (found.ropes[0].scaling.original_max_positions, found.ropes[0].scaling.long) == (4096, True)


def test_a_text_model_of_mistral3_has_the_defaults_of_its_own_type():
    text = {**FIELDS, "model_type": "mistral", "num_key_value_heads": 4}
    for kind, window, eps in (("mistral", 4096, 1e-6), ("ministral3", None, 1e-5)):
        cfg = parse_config({"model_type": "mistral3", "text_config": text | {"model_type": kind}}, name="m")
        assert (cfg.attentions[0].window, cfg.norm.eps) == (window, eps)


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
    ("values", "named"),
    [
        (FIELDS | {"model_type": "mamba"}, "'mamba'"),
        (
            FIELDS | {"num_attention_heads": 0},
            "num_attention_heads is 0 in config.json; must be a positive whole number",
        ),
        (FIELDS | {"num_hidden_layers": None}, "num_hidden_layers is None"),
        (FIELDS | {"vocab_size": "many"}, "vocab_size is 'many'"),
        (FIELDS | {"num_key_value_heads": -2}, "num_key_value_heads is -2"),
        (FIELDS | {"hidden_size": 2}, "head_dim is 0"),
        (FIELDS | {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
        (FIELDS | {"attention_bias": True}, "attention_bias True"),
        (FIELDS | {"use_sliding_window": True}, "use_sliding_window True"),
        (FIELDS | {"rope_scaling": {"rope_type": "yarn"}}, "'yarn'"),
        (FIELDS | {"rope_scaling": {"rope_type": "llama3"}}, "'factor'"),
        (FIELDS | {"num_key_value_heads": 3}, "3 key-value heads"),
        (
            ROPE | {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
            "'dynamic' is not supported; its frequencies change",
        ),
        (
            ROPE | {"rope_parameters": {"rope_type": "spiral"}},
            "'spiral' is not supported; supported: default, linear",
        ),
        (ROPE | {"rope_parameters": {"rope_type": "linear"}}, "no field 'factor', which rope_type 'linear' needs"),
        (ROPE | {"rope_parameters": {"rope_type": "linear", "factor": "two"}}, "factor is 'two'"),
        (
            ROPE | {"rope_parameters": {"rope_type": "longrope", **LONG, "long_factor": [1.0]}},
            "long_factor of rope_type 'longrope'",
        ),
        (ROPE | {"rope_parameters": {"partial_rotary_factor": 0.1}}, "partial_rotary_factor 0.1 of head_dim 32 is 3"),
        (GLM_4_5_AIR | {"n_group": 3}, "n_group 3 of 128 experts; must divide them"),
        (GLM_4_5_AIR | {"n_group": 128}, "n_group 128 of 128 experts.*groups of at least 2"),
        (GLM_4_5_AIR | {"n_group": 4, "topk_group": 5}, "topk_group 5 of n_group 4.*at most n_group"),
        (GLM_4_5_AIR | {"n_group": 64, "topk_group": 3}, "must have num_experts_per_tok 8 experts"),
        (GLM_4_5_AIR | {"num_experts_per_tok": 129}, "num_experts_per_tok 129 of 128 experts"),
        (GLM_4_5_AIR | {"first_k_dense_replace": 46}, "first_k_dense_replace 46 of 46 layers"),
        (GLM_4_5_AIR | {"mlp_layer_types": ["sparse"]}, "mlp_layer_types .* must be 46 of dense, sparse"),
        (GLM_4_5_AIR | {"per_layer_config": {"3": {"intermediate_size": 8}}}, "per_layer_config .* is not supported"),
        (GLM_4_5_AIR | {"scoring_func": "softmax"}, "scoring_func 'softmax' is not supported"),
        (FIELDS | {"model_type": "gpt_oss", "swiglu_alpha": 2.0}, "swiglu_alpha 2.0 is not supported; must be 1.702"),
        (MINIMAX_M2 | {"attn_type_list": [0] * 62}, "attn_type_list .* is not supported"),
        (MINIMAX_M2 | {"num_experts_per_tok": 257}, "num_experts_per_tok 257 of 256 experts"),
        (DEEPSEEK_V3 | {"kv_lora_rank": 0}, "kv_lora_rank is 0"),
        (DEEPSEEK_V3 | {"q_lora_rank": 0}, "q_lora_rank is 0"),
        (DEEPSEEK_V3 | {"attention_bias": True}, "attention_bias True is not supported"),
        (DEEPSEEK_V3 | {"topk_method": "greedy"}, "topk_method 'greedy' is not supported"),
        (GLM_4_7_FLASH | {"partial_rotary_factor": 0.5}, "partial_rotary_factor rotates 32 of 64 dimensions"),
        (
            FIELDS | {"partial_rotary_factor": 0.5},
            "partial_rotary_factor rotates 4 of 8 dimensions of a head; must be 1",
        ),
        (changed(layer_types=["mamba"] * 32), "layer_types .* must be 32 of linear_attention, full_attention"),
        (changed(layer_types=["full_attention"] * 32), "layer_types are all 'full_attention'"),
        (changed(linear_num_key_heads=5), "linear_num_key_heads 5.*key heads must divide value heads"),
        (changed(linear_conv_kernel_dim=1), "linear_conv_kernel_dim 1.*at least 2"),
        *(
            ({"model_type": family, "text_config": {"norm_topk_prob": False}}, "norm_topk_prob False is not supported")
            for family in ("qwen3_5_moe", "qwen3_vl_moe")
        ),
        (changed(attn_output_gate=False), "attn_output_gate False is not supported; must be True"),
        (QWEN3_5_9B | {"text_config": None}, "text_config is None in config.json; must be an object"),
        (E2B | {"use_bidirectional_attention": "all"}, "use_bidirectional_attention 'all' is not supported"),
        (E2B | {"hidden_activation": "silu"}, "hidden_activation 'silu' is not supported"),
        (E2B | {"vocab_size_per_layer_input": 7}, "vocab_size_per_layer_input 7 is not supported"),
        (E2B | {"attention_k_eq_v": True, "num_global_key_value_heads": 3}, "num_global_key_value_heads 3"),
        (E2B | {"num_kv_shared_layers": 32}, "num_kv_shared_layers 32"),
        (E2B | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 5}, "top_k_experts 5 of 4 experts"),
        (
            E2B | {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 8},
            "use_double_wide_mlp true is not supported",
        ),
    ],
)
def test_unsupported_config_fields_are_refused(values, named):
    with pytest.raises(UserError, match=named):
        parse_config(values, name="m")


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
