"""Qwen3-VL-MoE: Qwen3-VL with a mixture of experts in place of every layer's MLP, stored as two tensors of a layer."""

from dataclasses import replace

from tinkerflow.backend.compute.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.decoder import decoder_config, text_fields, with_mixture
from tinkerflow.backend.compute.families import qwen3_vl
from tinkerflow.backend.compute.fused_experts import with_experts_apart
from tinkerflow.backend.compute.vision_config import read_vision


def _parse(fields: ConfigFields) -> ModelConfig:
    text = text_fields(fields)
    config = decoder_config(text, mlp="moe_intermediate_size", qk_norm=True, rope_theta=500_000.0)
    return replace(with_mixture(config, text, norm_topk=True), vision=read_vision(fields, sections=(24, 20, 20)))


FAMILY = replace(
    qwen3_vl.FAMILY,
    model_type="qwen3_vl_moe",
    title="Qwen3-VL-MoE",
    parse=_parse,
    unpack=with_experts_apart,
)
