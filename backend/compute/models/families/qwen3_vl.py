"""Qwen3-VL: Qwen3, and a tower that sees images. The tower is frozen."""

from dataclasses import replace
from functools import partial

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import (
    VISION_TEXT,
    decoder_config,
    decoder_projections,
    decoder_tensors,
    text_fields,
)
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.vision_config import read_vision


def parse_qwen3_vl(fields: ConfigFields, mlp: str = "intermediate_size") -> ModelConfig:
    """The config of Qwen3-VL. fields: of `config.json`. mlp: the field of the text model with the width of an MLP."""
    config = decoder_config(text_fields(fields), mlp=mlp, qk_norm=True, rope_theta=500_000.0)
    return replace(config, vision=read_vision(fields, sections=(24, 20, 20)))


FAMILY = Family(
    model_type="qwen3_vl",
    title="Qwen3-VL",
    parse=parse_qwen3_vl,
    projections=partial(decoder_projections, layer=VISION_TEXT),
    tensors=partial(decoder_tensors, layer=VISION_TEXT),
    embed="model.language_model.embed_tokens.weight",
    final_norm="model.language_model.norm.weight",
)
