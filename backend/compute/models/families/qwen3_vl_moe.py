"""Qwen3-VL-MoE: Qwen3-MoE and a vision tower. The files store the experts of a layer as two tensors."""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import text_fields
from tinkerflow.backend.compute.models.families.qwen3_moe import qwen3_moe
from tinkerflow.backend.compute.models.families.qwen3_vl import SECTIONS
from tinkerflow.backend.compute.models.family import LANGUAGE_MODEL, Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.fused_experts import with_separate_experts
from tinkerflow.backend.compute.models.vision_config import read_vision


def _qwen3_vl_moe(fields: ConfigFields) -> ModelConfig:
    text = text_fields(fields, "qwen3_vl_moe_text")
    text.refuse_others(norm_topk_prob=True)
    moe = qwen3_moe(text, normalized=True, rope_theta=500_000.0)
    return replace(moe, vision=read_vision(fields, SECTIONS))


FAMILY = Family(
    model_type="qwen3_vl_moe",
    title="Qwen3-VL-MoE",
    parse=_qwen3_vl_moe,
    names=LANGUAGE_MODEL,
    unpack=with_separate_experts,
)
