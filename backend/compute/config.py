"""What a base model is made of, read from the `config.json` of its Hugging Face folder."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tinkerflow.backend.errors import UserError

ARCHITECTURES = ("qwen2", "qwen3", "qwen3_moe", "llama")


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

    `heads` * `head_dim` need not equal `hidden` (Qwen3). `qk_norm`: RMS norms on each head of q and k (Qwen3).
    `qkv_bias`: q, k and v have biases (Qwen2.5). `experts`: 0 in a dense model; else each token goes to
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
    qk_norm: bool
    qkv_bias: bool
    experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = False


def load_config(folder: str | Path) -> ModelConfig:
    """The config of the model in `folder`; UserError when it is missing, unreadable or of a kind we do not run."""
    path = Path(folder) / "config.json"
    try:
        fields = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise UserError(f"base model {str(folder)!r}: {path} cannot be read as JSON ({error})") from error
    if not isinstance(fields, dict):
        raise UserError(f"base model {str(folder)!r}: {path} holds a {type(fields).__name__}, not an object")
    return parse_config(fields, name=str(folder))


def parse_config(fields: Mapping[str, Any], *, name: str) -> ModelConfig:
    """A config from the fields of a Hugging Face `config.json`; errors call the model `name`."""
    kind = fields.get("model_type")
    if kind not in ARCHITECTURES:
        raise UserError(f"base model {name!r}: model_type {kind!r}; supported: {', '.join(ARCHITECTURES)}")
    experts = kind == "qwen3_moe"
    try:
        heads, hidden = int(fields["num_attention_heads"]), int(fields["hidden_size"])
        config = ModelConfig(
            architecture=kind,
            vocab=int(fields["vocab_size"]),
            hidden=hidden,
            layers=int(fields["num_hidden_layers"]),
            heads=heads,
            kv_heads=int(fields.get("num_key_value_heads") or heads),
            head_dim=int(fields.get("head_dim") or hidden // heads),
            mlp=int(fields["moe_intermediate_size" if experts else "intermediate_size"]),
            norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
            rope_theta=_rope_theta(fields),
            rope_scaling=_rope_scaling(fields, name),
            max_positions=int(fields["max_position_embeddings"]),
            tied=bool(fields.get("tie_word_embeddings", False)),
            qk_norm=kind in ("qwen3", "qwen3_moe"),
            qkv_bias=kind == "qwen2",
            experts=_number_of_experts(fields) if experts else 0,
            experts_per_token=int(fields["num_experts_per_tok"]) if experts else 0,
            norm_topk=experts and bool(fields.get("norm_topk_prob", False)),
        )
    except KeyError as error:
        raise UserError(f"base model {name!r}: config.json has no field {error.args[0]!r}") from error
    _refuse_what_we_do_not_compute(fields, name)
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise UserError(
            f"base model {name!r}: {config.heads} heads, {config.kv_heads} key-value heads, head_dim "
            f"{config.head_dim}; key-value heads must divide heads and head_dim must be even"
        )
    if experts and not 1 <= config.experts_per_token <= config.experts:
        raise UserError(
            f"base model {name!r}: num_experts_per_tok {config.experts_per_token} of {config.experts} experts; "
            "must be from 1 to their number"
        )
    return config


def _number_of_experts(fields: Mapping[str, Any]) -> int:
    # transformers 5 writes num_local_experts; earlier releases, and most of the hub, num_experts.
    return int(fields["num_experts"] if "num_experts" in fields else fields["num_local_experts"])


def _refuse_what_we_do_not_compute(fields: Mapping[str, Any], name: str) -> None:
    wanted = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    wanted |= {"decoder_sparse_step": 1, "mlp_only_layers": []}  # every layer has experts, or none
    for key, value in wanted.items():
        if fields.get(key) not in (None, value):
            raise UserError(f"base model {name!r}: {key} {fields[key]!r} is not supported; it must be {value!r}")


def _rope_fields(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    # transformers 5 writes rope_parameters; earlier releases wrote rope_scaling beside rope_theta.
    return fields.get("rope_parameters") or fields.get("rope_scaling") or {}


def _rope_theta(fields: Mapping[str, Any]) -> float:
    return float(fields.get("rope_theta") or _rope_fields(fields).get("rope_theta") or 10_000.0)


def _rope_scaling(fields: Mapping[str, Any], name: str) -> Llama3Rope | None:
    rope = _rope_fields(fields)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind != "llama3":
        raise UserError(f"base model {name!r}: rope_type {kind!r} is not supported; supported: default, llama3")
    return Llama3Rope(
        factor=float(rope["factor"]),
        low_freq_factor=float(rope["low_freq_factor"]),
        high_freq_factor=float(rope["high_freq_factor"]),
        original_max_positions=int(rope["original_max_position_embeddings"]),
    )
