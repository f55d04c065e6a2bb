"""Qwen3-Next: a hybrid of gated DeltaNet and attention, with a mixture of experts and a shared expert."""

from tinkerflow.backend.compute.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.families import Family
from tinkerflow.backend.compute.hybrid import SKIPPED, hybrid_config, hybrid_projections, hybrid_tensors


def _parse(fields: ConfigFields) -> ModelConfig:
    return hybrid_config(fields, fused=True, experts=True)


FAMILY = Family(
    model_type="qwen3_next",
    title="Qwen3-Next",
    parse=_parse,
    projections=hybrid_projections,
    tensors=hybrid_tensors,
    skipped=SKIPPED,
)
