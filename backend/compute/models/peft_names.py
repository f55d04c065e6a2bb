"""The names and shapes of an adapter's tensors in PEFT's files. No JAX."""

from __future__ import annotations

import numpy as np

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import projections
from tinkerflow.backend.compute.models.layers.matrices import Projection
from tinkerflow.backend.spec.commands import LoraSpec

PEFT = "base_model.model."  # PEFT's prefix of a module's name


def targets(cfg: ModelConfig, spec: LoraSpec) -> tuple[str, ...]:
    """The names of the projections that `spec` adapts."""
    return tuple(name for name, projection in projections(cfg).items() if getattr(spec, projection.switch))


def matrix_rank(spec: LoraSpec, projection: Projection) -> int:
    """The rank of a projection's A and B in an adapter of `spec`."""
    return spec.expert_rank or spec.rank if projection.of_experts else spec.rank


def pair_names(module: str) -> tuple[str, str]:
    """The names of A [rank, inputs] and B [outputs, rank] of a module that Hugging Face calls `module`."""
    return f"{PEFT}{module}.lora_A.weight", f"{PEFT}{module}.lora_B.weight"


def modules(cfg: ModelConfig, spec: LoraSpec) -> dict[str, Projection]:
    """The projection of every module that an adapter of `spec` adapts, by the module's name in Hugging Face."""
    whole = projections(cfg)
    return {
        whole[name].name(place): whole[name] for name in targets(cfg, spec) for place in np.ndindex(whole[name].stack)
    }
