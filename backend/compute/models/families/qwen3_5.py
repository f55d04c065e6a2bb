"""Qwen3.5 and Qwen3.6: a hybrid of gated DeltaNet and attention, and a tower that sees images. It is frozen."""

from functools import partial

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import VISION_TEXT, text_fields
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.hybrid import (
    SKIPPED,
    hybrid_config,
    hybrid_projections,
    hybrid_tensors,
    with_tower,
    with_tower_named,
)


def _parse(fields: ConfigFields) -> ModelConfig:
    return with_tower(hybrid_config(text_fields(fields)), fields)


FAMILY = Family(
    model_type="qwen3_5",
    title="Qwen3.5",
    parse=_parse,
    projections=partial(hybrid_projections, layer=VISION_TEXT),
    tensors=partial(hybrid_tensors, layer=VISION_TEXT),
    unpack=with_tower_named,
    embed="model.language_model.embed_tokens.weight",
    final_norm="model.language_model.norm.weight",
    skipped=SKIPPED,
)
