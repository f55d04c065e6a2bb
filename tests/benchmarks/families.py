"""Decoding of models with sliding windows and of a hybrid beside the plain one, on CPU: useful FLOP a CPU-second.

    python -m tests.benchmarks.families [--repeat 3]

Random models of one size (small_model.py's): all layers with full attention; windows of 256 in all layers; windows in
five of six; linear attention in three of four. Each decodes 64 prompts of 64 tokens, 64 tokens of each, and one prompt
of 1,500 tokens, 64 of it; prefill counts, too, and is most of the second. Models take turns, round by round; a first
round of each compiles and does not count; the median of the others does. FLOP are those of matrices, and of the
positions that attention sees; linear attention has 8 for each number of its state. RESULTS.md keeps the output.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path
from typing import Any

import torch
import transformers
from tests.benchmarks.decoding import Measured
from tests.benchmarks.small_model import HEAD_DIM, HEADS, HIDDEN, KV_HEADS, LAYERS, MLP, VOCAB
from tests.compute.conftest import PROCESSOR, QWEN_VISION, biases_are_not_zero

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import load_config
from tinkerflow.backend.compute.models.layers import DELTA
from tinkerflow.backend.compute.planning.roofline import useful_flops

SIZE = {
    "vocab_size": VOCAB,
    "hidden_size": HIDDEN,
    "intermediate_size": MLP,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": True,
}
LINEAR = {
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (LAYERS // 4),
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
}
LOCAL = {"layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * (LAYERS // 6), "sliding_window": 256}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("qwen3", {}),
    "windows": ("mistral", {"sliding_window": 256}),
    "windows in five of six": ("gemma3_text", {**LOCAL, "query_pre_attn_scalar": HEAD_DIM, "pad_token_id": None}),
    "hybrid": ("qwen3_5", LINEAR),
}
CASES = {"64 x (64 + 64)": [[(64, 64)]] * 64, "1 x (1,500 + 64)": [[(1500, 64)]]}


def make(folder: Path, family: str, shape: dict[str, Any]) -> None:
    """Write a random model of that family; one of Qwen3.5 has a small tower for images."""
    torch.manual_seed(0)
    kind = transformers.AutoModelForCausalLM
    if family == "qwen3_5":
        kind, text = transformers.AutoModelForImageTextToText, {**shape, "model_type": "qwen3_5_text"}
        tower = {**QWEN_VISION, "out_hidden_size": HIDDEN}
        shape = {"text_config": text, "vision_config": tower, "tie_word_embeddings": True, "image_token_id": VOCAB - 1}
    model = kind.from_config(transformers.AutoConfig.for_model(family, **shape))
    biases_are_not_zero(model)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))


def flops(cfg: ModelConfig, prompt: int, most: int) -> float:
    """FLOP for one of the tokens that are made, of a prompt and `most` more; the prompt's own are shared out."""
    tokens = prompt + most
    total = tokens * (useful_flops(cfg, None, 0) / 2) + 2 * most * cfg.vocab * cfg.hidden
    for attention in cfg.attentions:
        seen = sum(min(position + 1, attention.window or tokens) for position in range(tokens))
        total += 2 * cfg.heads * sum(attention.widths) * seen
    if cfg.delta is not None:
        each = cfg.delta.value_heads * cfg.delta.key_dim * cfg.delta.value_dim
        total += 8 * tokens * each * len(cfg.numbers(DELTA))
    return total / most


def main() -> None:
    """Make the models, let them take turns, and print a line of each for each case."""
    parser = argparse.ArgumentParser(description=str(__doc__).splitlines()[0])
    parser.add_argument("--repeat", type=int, default=3)
    repeat: int = parser.parse_args().repeat
    with tempfile.TemporaryDirectory() as scratch:
        measured: dict[str, Measured] = {}
        configs: dict[str, ModelConfig] = {}
        for name, (family, given) in MODELS.items():
            folder = Path(scratch) / family
            make(folder, family, {**SIZE, **given})
            measured[name], configs[name] = Measured(folder), load_config(folder)
        for case, users in CASES.items():
            took: dict[str, list[float]] = {name: [] for name in MODELS}
            for turn in range(1 + repeat):
                for name, one in measured.items():
                    milliseconds = one.users(users)
                    took[name] += [milliseconds] if turn else []
            rates: dict[str, float] = {}
            for name, cfg in configs.items():
                each = flops(cfg, *users[0][0])
                rates[name] = each / statistics.median(took[name]) / 1e6
                print(
                    f"{case:18}{name:24}{statistics.median(took[name]):8.2f} CPU-ms a token, {each / 1e9:6.3f} GFLOP, "
                    f"{rates[name]:6.1f} GFLOP a CPU-second, {rates[name] / rates['plain']:.2f} of plain; "
                    f"load {os.getloadavg()[0]:.1f}",
                    flush=True,
                )


if __name__ == "__main__":
    main()
