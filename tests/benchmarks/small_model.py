"""The model of the speed benchmarks: Qwen3's architecture with 82 million parameters, generated from a seed.

    python -m tests.benchmarks.small_model FOLDER

Its tokenizer is the tiny model's. The tokenizer does not affect the cost of a step.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from tinkerflow.deployments.tiny_model import make_tiny

SEED = 20240501
VOCAB, HIDDEN, LAYERS, HEADS, KV_HEADS, HEAD_DIM, MLP = 8192, 768, 12, 12, 4, 64, 2048


def make_small(folder: Path) -> Path:
    """Write the model, about 330 MB, to a new folder. Its bytes are the same every time."""
    path = make_tiny(folder)
    config = json.loads((path / "config.json").read_text())
    config |= {
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_hidden_layers": LAYERS,
        "max_window_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
    }
    (path / "config.json").write_text(json.dumps(config, indent=2))
    stream = np.random.default_rng(SEED)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return stream.standard_normal((rows, columns), np.float32) * np.float32(0.02)

    def ones(size: int) -> np.ndarray:
        return np.ones(size, np.float32)

    tensors = {"model.embed_tokens.weight": matrix(VOCAB, HIDDEN), "model.norm.weight": ones(HIDDEN)}
    for layer in range(LAYERS):
        tensors |= {
            f"model.layers.{layer}.{name}": value
            for name, value in {
                "input_layernorm.weight": ones(HIDDEN),
                "post_attention_layernorm.weight": ones(HIDDEN),
                "self_attn.q_norm.weight": ones(HEAD_DIM),
                "self_attn.k_norm.weight": ones(HEAD_DIM),
                "self_attn.q_proj.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
                "mlp.gate_proj.weight": matrix(MLP, HIDDEN),
                "mlp.up_proj.weight": matrix(MLP, HIDDEN),
                "mlp.down_proj.weight": matrix(HIDDEN, MLP),
            }.items()
        }
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    return path


if __name__ == "__main__":
    print(make_small(Path(sys.argv[1])))
