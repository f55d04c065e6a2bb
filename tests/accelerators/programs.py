"""The models that budgets are about, and a command that prints the figures of one program.

    python programs.py 4B h100:1 forward_backward 4 1024 [rank=32 tensor=8 expert=1 save=/tmp/text]

It needs the environment that `environment.py` makes. What was compiled before is not compiled again.
"""

from __future__ import annotations

import sys
from typing import Any

from tests.accelerators import environment

from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.families import parse_config
from tinkerflow.backend.compute.roofline_programs import Programs

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


MODELS = {  # the fields of config.json that say what is computed
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
}


def config(model: str) -> ModelConfig:
    """The config of one of MODELS."""
    return parse_config(MODELS[model], name=model)


def main(model: str, target: str, program: str, *rest: str) -> None:
    """Print the figures of one program. rest: its sizes, and named options of it and of `Programs`."""
    sizes = [int(size) for size in rest if "=" not in size]
    options: dict[str, Any] = dict(option.split("=") for option in rest if "=" in option)
    fields = {name: int(options.pop(name)) for name in ("rank", "tensor", "expert") if name in options}
    more = {name: int(value) if value.isdigit() else value for name, value in options.items()}
    programs = Programs(config(model), target, **fields)
    print(getattr(programs, program)(*sizes, **{"cache": str(environment.compiled()), **more}).describe())


if __name__ == "__main__":
    main(*sys.argv[1:])
