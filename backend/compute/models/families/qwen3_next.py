"""Qwen3-Next: a hybrid of gated DeltaNet and attention, with a mixture of experts and a shared expert."""

from functools import partial

from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.hybrid import SKIPPED, hybrid_config, hybrid_projections, hybrid_tensors

FAMILY = Family(
    model_type="qwen3_next",
    title="Qwen3-Next",
    parse=partial(hybrid_config, fused=True, experts=True),
    projections=hybrid_projections,
    tensors=hybrid_tensors,
    skipped=SKIPPED,
)
