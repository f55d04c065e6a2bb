"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471): attention with biases and partly rotated heads; sigmoid-routed experts."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, rotary_share
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import Attention, RMSNorm
from tinkerflow.backend.compute.models.routed import routed_layers, without_predictors


def _glm4_moe(fields: ConfigFields) -> ModelConfig:
    norm = RMSNorm.read(fields, eps=1e-5)
    attention = Attention.read(
        rotary_share(fields, 0.5).without("attention_bias"),
        partial=True,
        qk_norm="each head" if fields.flag("use_qk_norm") else "none",
        norm=norm,
        biases=("q", "k", "v") if fields.flag("attention_bias") else (),
    )
    return decoder(fields, norm, routed_layers(fields, attention, norm))


FAMILY = Family(model_type="glm4_moe", title="GLM-4.5", parse=_glm4_moe, unpack=without_predictors)
