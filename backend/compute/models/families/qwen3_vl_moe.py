"""Qwen3-VL-MoE: Qwen3-VL with a mixture of experts in place of every layer's MLP, stored as two tensors of a layer."""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import text_fields, with_mixture
from tinkerflow.backend.compute.models.families.qwen3_vl import FAMILY as QWEN3_VL
from tinkerflow.backend.compute.models.families.qwen3_vl import parse_qwen3_vl
from tinkerflow.backend.compute.models.fused_experts import with_experts_apart


def _parse(fields: ConfigFields) -> ModelConfig:
    config = parse_qwen3_vl(fields, mlp="moe_intermediate_size")
    return with_mixture(config, text_fields(fields), norm_topk=True)


FAMILY = replace(
    QWEN3_VL,
    model_type="qwen3_vl_moe",
    title="Qwen3-VL-MoE",
    parse=_parse,
    unpack=with_experts_apart,
)
