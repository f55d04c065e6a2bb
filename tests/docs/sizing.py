"""The tables of models and devices in `docs/sizing.md`, computed from the shapes of models. Nothing is measured."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import parse_config
from tinkerflow.backend.compute.planning.array_sizes import weight_bytes
from tinkerflow.backend.compute.planning.memory_plan import GB, MemoryPlan, plan_memory
from tinkerflow.backend.compute.planning.topologies import DEVICES, Device
from tinkerflow.backend.compute.planning.training_memory import adapter_bytes
from tinkerflow.backend.compute.sampler.snapshot_cache import usual_spec
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import BaseWeights, GroupConfig
from tinkerflow.backend.spec.optimizers import DEFAULT_OPTIMIZER

Dtype = Literal["float32", "bfloat16"]


@dataclass(frozen=True)
class Shape:
    """A base model's shape, from its `config.json` on the hub."""

    name: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    tied: bool
    experts: int = 0
    experts_per_token: int = 0

    @cached_property
    def cfg(self) -> ModelConfig:
        """The shape in the service's own form."""
        family = "qwen3_moe" if self.experts else "llama" if "Llama" in self.name else "qwen3"
        fields = {
            "model_type": family,
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": 32768,
            "tie_word_embeddings": self.tied,
            "num_experts": self.experts,
            "num_experts_per_tok": self.experts_per_token,
            "moe_intermediate_size" if self.experts else "intermediate_size": self.mlp,
        }
        return parse_config(fields, name=self.name)

    def group(self, dtype: Dtype, base_weights: BaseWeights) -> GroupConfig:
        """The default settings of a group of one device."""
        return GroupConfig(self.name, dtype, 1, 1, 32768, 0, 64, 8, "", base_weights)

    @property
    def parameters(self) -> int:
        """Parameters of the whole model."""
        return self.weights("float32", "full") // 4

    def weights(self, dtype: Dtype, base_weights: BaseWeights) -> int:
        """Bytes of the base weights."""
        return weight_bytes(self.cfg, self.group(dtype, base_weights))

    @property
    def adapter(self) -> int:
        """Bytes of one model in training: weights, gradients and two moments in float32, all targets, rank 32."""
        return adapter_bytes(
            self.cfg, self.group("bfloat16", "full"), usual_spec(self.cfg, "divided"), DEFAULT_OPTIMIZER
        )

    def kv(self, itemsize: int) -> int:
        """Bytes of the KV cache for one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * itemsize


def planned(device: Device, shape: Shape, base_weights: BaseWeights) -> MemoryPlan | None:
    """The plan of a group of one such device in bfloat16, or None if the base model does not fit."""
    try:
        return plan_memory(shape.cfg, shape.group("bfloat16", base_weights), device.limit)
    except UserError:
        return None


MODELS = (
    Shape("Qwen3-0.6B", 151936, 1024, 28, 16, 8, 128, 3072, tied=True),
    Shape("Qwen3-1.7B", 151936, 2048, 28, 16, 8, 128, 6144, tied=True),
    Shape("Llama-3.2-1B", 128256, 2048, 16, 32, 8, 64, 8192, tied=True),
    Shape("Qwen3-4B", 151936, 2560, 36, 32, 8, 128, 9728, tied=True),
    Shape("Qwen2.5-7B", 152064, 3584, 28, 28, 4, 128, 18944, tied=False),
    Shape("Llama-3.1-8B", 128256, 4096, 32, 32, 8, 128, 14336, tied=False),
    Shape("Qwen3-8B", 151936, 4096, 36, 32, 8, 128, 12288, tied=False),
    Shape("Qwen3-14B", 151936, 5120, 40, 40, 8, 128, 17408, tied=False),
    Shape("Qwen3-32B", 151936, 5120, 64, 64, 8, 128, 25600, tied=False),
    Shape("Qwen3-30B-A3B", 151936, 2048, 48, 32, 4, 128, 768, tied=False, experts=128, experts_per_token=8),
)
SHOWN = [DEVICES[name] for name in ("v5e", "l4", "v6e", "l40s", "h100", "h200")]


KINDS: tuple[tuple[Dtype, BaseWeights], ...] = (
    ("float32", "full"),
    ("bfloat16", "full"),
    ("bfloat16", "int8"),
    ("bfloat16", "nf4"),
)


def needs() -> str:
    """A table of the memory that each model needs."""
    weights = "weights, float32 | bfloat16 | bfloat16 + int8 | bfloat16 + nf4"
    rows = [f"| model | parameters | {weights} | one in training | KV, 1,000 tokens |", "|---" * 8 + "|"]
    for shape in MODELS:
        weights = [_gb(shape.weights(*kind)) for kind in KINDS]
        sizes = (*weights, _gb(shape.adapter), _gb(1000 * shape.kv(2)))
        rows.append(f"| {shape.name} | {shape.parameters / 1e9:.1f} B | {' | '.join(sizes)} |")
    return "\n".join(rows)


def fits(base_weights: BaseWeights) -> str:
    """A table of the number of models of rank 32 that one device trains at the same time, and its longest context."""
    rows = [
        "| model | " + " | ".join(f"{one.name}, {one.memory / GB:.1f} GB" for one in SHOWN) + " |",
        "|---" * (1 + len(SHOWN)) + "|",
    ]
    for shape in MODELS:
        plans = [planned(device, shape, base_weights) for device in SHOWN]
        cells = (
            f"{plan.resident_adapters}, {plan.context:,}" if plan and plan.resident_adapters else "no" for plan in plans
        )
        rows.append(f"| {shape.name} | " + " | ".join(cells) + " |")
    return "\n".join(rows)


def _gb(size: float) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.0f} MB"
