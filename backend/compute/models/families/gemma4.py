"""Gemma 4 as it is published: the text model, and parts that see images and hear (not loaded)."""

from functools import partial

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import VISION_TEXT, text_fields
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.families.gemma4_text import (
    gemma4_inputs,
    gemma4_projections,
    gemma4_tensors,
    gemma4_unpacked,
    parse_gemma4,
)

_MODEL = "model.language_model."


def _parse(fields: ConfigFields) -> ModelConfig:
    return parse_gemma4(text_fields(fields))


FAMILY = Family(
    model_type="gemma4",
    title="Gemma 4",
    parse=_parse,
    projections=partial(gemma4_projections, layer=VISION_TEXT),
    tensors=partial(gemma4_tensors, layer=VISION_TEXT),
    unpack=partial(gemma4_unpacked, layer=VISION_TEXT),
    embed=f"{_MODEL}embed_tokens.weight",
    final_norm=f"{_MODEL}norm.weight",
    skipped=tuple(f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")),
    inputs=partial(gemma4_inputs, model=_MODEL),
)
