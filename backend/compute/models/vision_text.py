"""The text model in the folder of a model that also sees images. The part that sees is not loaded. No JAX.

Gemma 3 and Mistral's models keep the layout of LLaVA: their files call the text model `language_model.model`, or
`model.language_model.model` if transformers 5 wrote them. transformers (and so PEFT) calls it `model.language_model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import (
    VISION_TEXT,
    LayerTensor,
    decoder_projections,
    decoder_tensors,
    text_fields,
)
from tinkerflow.backend.compute.models.families import Family

_SEEING = tuple(
    f"{before}{part}."
    for before in ("", "model.")
    for part in ("vision_tower", "vision_model", "multi_modal_projector")
)


def inside(
    family: Family,
    *,
    model_type: str,
    title: str,
    tensors: Callable[..., dict[str, LayerTensor]] = decoder_tensors,
    defaults: Mapping[str, Any] = {},
) -> Family:
    """The family whose text model is one of `family`.

    family: says how the fields are parsed. model_type, title: of the whole model. tensors: those of a layer, given what
    their names begin with. defaults: fields of `text_config` that its file may leave out.
    """

    def parse(fields: ConfigFields) -> ModelConfig:
        return family.parse(text_fields(fields, defaults))

    return Family(
        model_type=model_type,
        title=title,
        parse=parse,
        projections=partial(decoder_projections, layer=VISION_TEXT),
        tensors=partial(tensors, layer=VISION_TEXT),
        unpack=lambda _, tensors: {_renamed(name): tensor for name, tensor in tensors.items()},
        embed="model.language_model.embed_tokens.weight",
        final_norm="model.language_model.norm.weight",
        skipped=_SEEING,
    )


def _renamed(name: str) -> str:
    name = name.replace("language_model.lm_head.", "lm_head.").replace("language_model.model.", "language_model.")
    return f"model.{name}" if name.startswith("language_model.") else name
