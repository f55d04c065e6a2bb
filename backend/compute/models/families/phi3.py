"""Phi-3 and Phi-4 (arXiv 2404.14219): Mistral with fused matrices (q, k and v; gate and up), and LongRoPE."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families.mistral import mistral
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields


def _phi3(fields: ConfigFields) -> ModelConfig:
    return mistral(fields.with_defaults(original_max_position_embeddings=4096), fused=True, eps=1e-5)


FAMILY = Family(model_type="phi3", title="Phi-4", parse=_phi3)
