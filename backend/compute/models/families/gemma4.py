"""Gemma 4 as published: the text model, without the image and audio towers in its files."""

from functools import partial

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import text_fields
from tinkerflow.backend.compute.models.families.gemma4_text import gemma4, unpack_gemma4
from tinkerflow.backend.compute.models.family import LANGUAGE_MODEL, Family
from tinkerflow.backend.compute.models.fields import ConfigFields


def _gemma4(fields: ConfigFields) -> ModelConfig:
    return gemma4(text_fields(fields, "gemma4_text"))


FAMILY = Family(
    model_type="gemma4",
    title="Gemma 4",
    parse=_gemma4,
    names=LANGUAGE_MODEL,
    unpack=partial(unpack_gemma4, layer=LANGUAGE_MODEL.layer),
    skipped=tuple(f"model.{part}." for part in ("vision_tower", "embed_vision", "audio_tower", "embed_audio")),
)
