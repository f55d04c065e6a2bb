"""What a base model is made of, and how the JSON files of its folder are read. No JAX, for the API and the engine."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkerflow.backend.errors import UserError


@dataclass(frozen=True)
class Llama3Rope:
    """Llama 3's rule for stretching slow rotary frequencies beyond the context of pre-training."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_positions: int


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Hashable, so that it can be a static argument of jit.

    architecture: `model_type` of its family. `heads` * `head_dim` need not equal `hidden` (Qwen3). max_positions: the
    longest sequence in tokens. tied: the embedding is the unembedding, too. qk_norm: RMS norms on each head of q and k
    (Qwen3). qkv_bias: q, k and v have biases (Qwen2.5). experts: 0 in a dense model; else each token goes to
    `experts_per_token` of them (Qwen3-MoE), `mlp` is the width of one, and `norm_topk` makes their shares sum to 1.
    """

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Llama3Rope | None
    max_positions: int
    tied: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = False


@dataclass(frozen=True)
class ConfigFields:
    """The fields of a Hugging Face `config.json`. Errors call the model `name`."""

    name: str
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A field; `default` when it is absent."""
        return self.values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        """A field; UserError when it is absent."""
        if key not in self.values:
            raise self.error(f"config.json has no field {key!r}")
        return self.values[key]

    def size(self, key: str, default: int | None = None) -> int:
        """A field that is a positive whole number; `default` when it is absent or null. UserError for anything else."""
        value = self[key] if default is None else self.get(key) or default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} is {value!r} in config.json; it must be a positive whole number")
        return value

    def refuse_others(self, **supported: Any) -> None:
        """UserError when a field is present, not null, and has another value than the one supported."""
        for key, value in supported.items():
            if self.get(key) not in (None, value):
                raise self.error(f"{key} {self[key]!r} is not supported; it must be {value!r}")

    def error(self, text: str) -> UserError:
        """An error about this model."""
        return UserError(f"base model {self.name!r}: {text}")


def read_object(path: Path, name: str) -> Mapping[str, Any]:
    """The JSON object in a file of the base model `name`; UserError when it is missing, unreadable or not an object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(f"base model {name!r}: {path} cannot be read as JSON ({error})") from error
    if not isinstance(value, dict):
        raise UserError(f"base model {name!r}: {path} holds a {type(value).__name__}, not an object")
    return value
