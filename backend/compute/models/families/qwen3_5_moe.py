"""Qwen3.5-MoE: Qwen3.5 with a mixture of experts, stored as two tensors per layer, and a shared expert."""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import text_fields
from tinkerflow.backend.compute.models.families.qwen3_5 import FAMILY as QWEN3_5
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.fused_experts import with_separate_experts
from tinkerflow.backend.compute.models.hybrid import hybrid, with_tower, with_tower_named


def _qwen3_5_moe(fields: ConfigFields) -> ModelConfig:
    text = text_fields(fields, "qwen3_5_moe_text")
    text.refuse_others(norm_topk_prob=True)
    return with_tower(hybrid(text, experts=True), fields)


FAMILY = replace(
    QWEN3_5,
    model_type="qwen3_5_moe",
    title="Qwen3.5-MoE",
    parse=_qwen3_5_moe,
    unpack=lambda cfg, tensors: with_separate_experts(cfg, with_tower_named(cfg, tensors)),
)
