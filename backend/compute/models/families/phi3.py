"""Phi-3 and Phi-4: a dense decoder whose q, k and v are one matrix, and whose gate and up are one; LongRoPE."""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.families.mistral import parse_mistral


def _parse(fields: ConfigFields) -> ModelConfig:
    return replace(parse_mistral(fields), fused=True)


FAMILY = Family(model_type="phi3", title="Phi-4", parse=_parse)
