"""GLM-4.7-Flash: latent attention, and sigmoid-routed experts, as in DeepSeek V3."""

from tinkerflow.backend.compute.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.families import Family
from tinkerflow.backend.compute.latent import latent_config, latent_projections, latent_tensors
from tinkerflow.backend.compute.routed import without_predictors


def _parse(fields: ConfigFields) -> ModelConfig:
    return latent_config(fields, norm_eps=1e-5)


FAMILY = Family(
    model_type="glm4_moe_lite",
    title="GLM-4.7-Flash",
    parse=_parse,
    projections=latent_projections,
    tensors=latent_tensors,
    unpack=without_predictors,
)
