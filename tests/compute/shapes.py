"""Model configs for tests that need no weights."""

from __future__ import annotations

from typing import Any

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.models.layers import MLP, Attention, DecoderLayer, GatedDeltaNet, RMSNorm

QWEN3_0_6B: dict[str, Any] = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "hidden_size": 1024,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 3072,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
QWEN3_4B = QWEN3_0_6B | {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "intermediate_size": 9728,
}

_ATTENTION = Attention(hidden=4, heads=1, kv_heads=1, head_dim=4, rope=None)
_WINDOW = Attention(hidden=4, heads=1, kv_heads=1, head_dim=4, rope=None, window=4)
_DELTA = GatedDeltaNet(4, key_heads=1, value_heads=1, key_dim=4, value_dim=4, taps=2, fused=False, norm_eps=1e-6)
# Layers with full attention, a sliding window and linear attention.
LAYERS = {
    "f": DecoderLayer(_ATTENTION, MLP(4, 8), RMSNorm(1e-6)),
    "s": DecoderLayer(_WINDOW, MLP(4, 8), RMSNorm(1e-6)),
    "d": DecoderLayer(_DELTA, MLP(4, 8), RMSNorm(1e-6)),
}


def config_like(fields: dict[str, Any], **changes: Any) -> ModelConfig:
    """The config for these fields of `config.json`, with some of them changed."""
    return parse_config(fields | changes, name="m")


def config_of(pattern: str) -> ModelConfig:
    """A config with one layer of LAYERS for each letter."""
    layers = tuple(LAYERS[letter] for letter in pattern)
    return ModelConfig("llama", 8, 4, layers, RMSNorm(1e-6), max_positions=64, tied=True)
