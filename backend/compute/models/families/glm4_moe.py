"""GLM-4.5, 4.6 and 4.7: grouped-query attention with biases and a partial rotary embedding; sigmoid-routed experts."""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder_config, rotary_share
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.routed import (
    routed_config,
    routed_projections,
    routed_tensors,
    without_predictors,
)


def _parse(fields: ConfigFields) -> ModelConfig:
    config = decoder_config(
        rotary_share(fields, 0.5),
        mlp="moe_intermediate_size",
        qk_norm=bool(fields.get("use_qk_norm", False)),
        qkv_bias=bool(fields.get("attention_bias", False)),
        computed=("attention_bias",),
    )
    return routed_config(fields, replace(config, norm_eps=float(fields.get("rms_norm_eps", 1e-5))))


FAMILY = Family(
    model_type="glm4_moe",
    title="GLM-4.5",
    parse=_parse,
    projections=routed_projections,
    tensors=routed_tensors,
    unpack=without_predictors,
)
