"""The text model of a model that also takes images, without its vision tower. No JAX.

Gemma 3 and Mistral's models keep the layout of LLaVA: their files call the text model `language_model.model`, or
`model.language_model.model` if transformers 5 wrote them. transformers (and so PEFT) calls it `model.language_model`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import text_fields
from tinkerflow.backend.compute.models.family import LANGUAGE_MODEL, Family, renamed
from tinkerflow.backend.compute.models.fields import ConfigFields

_TOWER = tuple(
    f"{before}{part}."
    for before in ("", "model.")
    for part in ("vision_tower", "vision_model", "multi_modal_projector")
)


def with_unused_tower(*text_models: Family, model_type: str, title: str, defaults: Mapping[str, Any] = {}) -> Family:
    """The family of models with a text model of one of these families, and a vision tower that is not loaded.

    text_models: the first one is the default. model_type, title: fields of the new family. defaults: fields of
    `text_config` that its file may leave out.
    """
    by_type = {family.model_type: family for family in text_models}

    def parse(fields: ConfigFields) -> ModelConfig:
        text = text_fields(fields, *by_type, defaults=defaults)
        return by_type[fields.inner("text_config").get("model_type", next(iter(by_type)))].parse(text)

    return replace(
        text_models[0],
        model_type=model_type,
        title=title,
        parse=parse,
        names=LANGUAGE_MODEL,
        unpack=lambda _, tensors: renamed(tensors, _published),
        skipped=_TOWER,
    )


def _published(name: str) -> str:
    name = name.replace("language_model.lm_head.", "lm_head.").replace("language_model.model.", "language_model.")
    return f"model.{name}" if name.startswith("language_model.") else name
