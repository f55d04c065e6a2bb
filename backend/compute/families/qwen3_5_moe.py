"""Qwen3.5-MoE: Qwen3.5 with a mixture of experts, stored as two tensors of a layer, and a shared expert."""

from functools import partial

from tinkerflow.backend.compute.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.decoder import VISION_TEXT, text_fields
from tinkerflow.backend.compute.families import Family
from tinkerflow.backend.compute.fused_experts import with_experts_apart
from tinkerflow.backend.compute.hybrid import (
    SKIPPED,
    hybrid_config,
    hybrid_projections,
    hybrid_tensors,
    with_tower,
    with_tower_named,
)


def _parse(fields: ConfigFields) -> ModelConfig:
    return with_tower(hybrid_config(text_fields(fields), experts=True), fields)


FAMILY = Family(
    model_type="qwen3_5_moe",
    title="Qwen3.5-MoE",
    parse=_parse,
    projections=partial(hybrid_projections, layer=VISION_TEXT),
    tensors=partial(hybrid_tensors, layer=VISION_TEXT),
    unpack=lambda cfg, tensors: with_experts_apart(cfg, with_tower_named(cfg, tensors)),
    embed="model.language_model.embed_tokens.weight",
    final_norm="model.language_model.norm.weight",
    skipped=SKIPPED,
)
