"""DeepSeek V3, R1 and Moonlight: latent attention, and sigmoid-routed experts."""

from tinkerflow.backend.compute.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.families import Family
from tinkerflow.backend.compute.latent import latent_config, latent_projections, latent_tensors
from tinkerflow.backend.compute.routed import without_predictors


def _parse(fields: ConfigFields) -> ModelConfig:
    return latent_config(fields, norm_eps=1e-6)


FAMILY = Family(
    model_type="deepseek_v3",
    title="DeepSeek V3",
    parse=_parse,
    projections=latent_projections,
    tensors=latent_tensors,
    unpack=without_predictors,
)
