"""The models of the budgets, and a command that prints the figures of one program.

    python -m tests.accelerators.models 4B h100:1 forward_backward 4 1024 [rank=32 tensor=8 expert=1 save=/tmp/text]

It needs the environment that `environment.py` makes. Programs in its cache are not compiled again.
"""

from __future__ import annotations

import dataclasses
import sys
from typing import Any

from tests.accelerators import environment
from tests.accelerators.model_programs import Programs

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import parse_config

_QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1_000_000,
    "max_position_embeddings": 40960,
    "hidden_act": "silu",
}


def _qwen3(hidden: int, layers: int, heads: int, mlp: int, *, tied: bool = False, **more: Any) -> dict[str, Any]:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads, "intermediate_size": mlp}
    return {**_QWEN3, **sizes, "tie_word_embeddings": tied, **more}


MODELS = {  # the fields of config.json that determine the computation
    "0.6B": _qwen3(1024, 28, 16, 3072, tied=True),
    "4B": _qwen3(2560, 36, 32, 9728, tied=True),
    "8B": _qwen3(4096, 36, 32, 12288),
    "32B": _qwen3(5120, 64, 64, 25600),
    "30B-A3B": _qwen3(
        2048,
        48,
        32,
        6144,
        model_type="qwen3_moe",
        num_key_value_heads=4,
        moe_intermediate_size=768,
        num_experts=128,
        num_experts_per_tok=8,
        norm_topk_prob=True,
        decoder_sparse_step=1,
        mlp_only_layers=[],
    ),
    "Qwen3-VL-8B": {
        "model_type": "qwen3_vl",
        "image_token_id": 151655,
        "text_config": _qwen3(4096, 36, 32, 12288, model_type="qwen3_vl_text", max_position_embeddings=262144),
        "vision_config": {
            "depth": 27,
            "hidden_size": 1152,
            "num_heads": 16,
            "intermediate_size": 4304,
            "patch_size": 16,
            "num_position_embeddings": 2304,
            "deepstack_visual_indexes": [8, 16, 24],
            "out_hidden_size": 4096,
            "hidden_act": "gelu_pytorch_tanh",
            "in_channels": 3,
        },
    },
    "gpt-oss-20b": {
        "model_type": "gpt_oss",
        "vocab_size": 201088,
        "hidden_size": 2880,
        "intermediate_size": 2880,
        "num_hidden_layers": 24,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "sliding_window": 128,
        "num_local_experts": 32,
        "num_experts_per_tok": 4,
        "swiglu_limit": 7.0,
        "attention_bias": True,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
    },
    "Gemma-3-12B": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "hidden_size": 3840,
        "intermediate_size": 15360,
        "num_hidden_layers": 48,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 256,
        "sliding_window": 1024,
        "query_pre_attn_scalar": 256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-06,
    },
    "Gemma-4-E4B": {
        "model_type": "gemma4_text",
        "final_logit_softcapping": 30.0,
        "num_attention_heads": 8,
        "head_dim": 256,
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "num_hidden_layers": 42,
        "num_key_value_heads": 2,
        "num_kv_shared_layers": 18,
    },
    "Qwen3.5-9B": {
        "model_type": "qwen3_5",
        "text_config": {
            "vocab_size": 248320,
            "hidden_size": 4096,
            "intermediate_size": 12288,
            "num_hidden_layers": 32,
            "num_attention_heads": 16,
            "num_key_value_heads": 4,
            "head_dim": 256,
            "full_attention_interval": 4,
            "linear_conv_kernel_dim": 4,
            "linear_key_head_dim": 128,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_value_head_dim": 128,
            "partial_rotary_factor": 0.25,
            "rms_norm_eps": 1e-06,
            "max_position_embeddings": 262144,
            "tie_word_embeddings": False,
        },
    },
    "GLM-4.7-Flash": {
        "model_type": "glm4_moe_lite",
        "vocab_size": 154880,
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "n_routed_experts": 64,
        "num_experts_per_tok": 4,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 768,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "v_head_dim": 256,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.8,
        "rms_norm_eps": 1e-05,
        "max_position_embeddings": 202752,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1000000.0,
        },
    },
}


def config(model: str) -> ModelConfig:
    return parse_config(MODELS[model], name=model)


def main(model: str, target: str, program: str, *rest: str) -> None:
    """Print the figures of one program. rest: its sizes, and named options of the program and of `Programs`."""
    sizes = [int(size) for size in rest if "=" not in size]
    named = (option.split("=") for option in rest if "=" in option)
    options: dict[str, Any] = {name: int(value) if value.isdigit() else value for name, value in named}
    fields = {field.name: options.pop(field.name) for field in dataclasses.fields(Programs) if field.name in options}
    programs = Programs(config(model), target, **fields)
    print(getattr(programs, program)(*sizes, **{"cache": str(environment.compiled()), **options}).describe())


if __name__ == "__main__":
    main(*sys.argv[1:])
