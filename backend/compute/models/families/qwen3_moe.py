"""Qwen3-MoE: Qwen3 with a mixture of experts in place of every layer's MLP."""

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder_config, with_mixture
from tinkerflow.backend.compute.models.families import Family


def _parse(fields: ConfigFields) -> ModelConfig:
    return with_mixture(decoder_config(fields, mlp="moe_intermediate_size", qk_norm=True), fields, norm_topk=False)


FAMILY = Family(model_type="qwen3_moe", title="Qwen3-MoE", parse=_parse)
