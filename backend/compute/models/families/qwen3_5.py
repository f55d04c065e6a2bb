"""Qwen3.5 and Qwen3.6: a hybrid of gated DeltaNet and attention, and a vision tower. The tower is frozen."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import text_fields
from tinkerflow.backend.compute.models.family import LANGUAGE_MODEL, Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.hybrid import SKIPPED, hybrid, with_tower, with_tower_named


def _qwen3_5(fields: ConfigFields) -> ModelConfig:
    return with_tower(hybrid(text_fields(fields, "qwen3_5_text")), fields)


FAMILY = Family(
    model_type="qwen3_5",
    title="Qwen3.5",
    parse=_qwen3_5,
    names=LANGUAGE_MODEL,
    unpack=with_tower_named,
    skipped=SKIPPED,
)
