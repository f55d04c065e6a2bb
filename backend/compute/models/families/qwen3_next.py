"""Qwen3-Next: a hybrid of gated DeltaNet and attention, with a mixture of experts and a shared expert."""

from functools import partial

from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.hybrid import SKIPPED, hybrid

FAMILY = Family(
    model_type="qwen3_next",
    title="Qwen3-Next",
    parse=partial(hybrid, fused=True, experts=True),
    skipped=SKIPPED,
)
