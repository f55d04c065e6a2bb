"""Qwen3-VL (arXiv 2511.21631): Qwen3, and a vision tower. The tower is frozen."""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import text_fields
from tinkerflow.backend.compute.models.families.qwen3 import qwen3
from tinkerflow.backend.compute.models.family import LANGUAGE_MODEL, Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.vision_config import read_vision

SECTIONS = (24, 20, 20)  # of M-RoPE, if the file sets none


def _qwen3_vl(fields: ConfigFields) -> ModelConfig:
    text = qwen3(text_fields(fields, "qwen3_vl_text"), rope_theta=500_000.0)
    return replace(text, vision=read_vision(fields, SECTIONS))


FAMILY = Family(model_type="qwen3_vl", title="Qwen3-VL", parse=_qwen3_vl, names=LANGUAGE_MODEL)
