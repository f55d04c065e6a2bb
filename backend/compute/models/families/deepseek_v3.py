"""DeepSeek V3, R1 and Moonlight: latent attention, and sigmoid-routed experts."""

from functools import partial

from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.latent import latent_config, latent_projections, latent_tensors
from tinkerflow.backend.compute.models.routed import without_predictors

FAMILY = Family(
    model_type="deepseek_v3",
    title="DeepSeek V3",
    parse=partial(latent_config, norm_eps=1e-6),
    projections=latent_projections,
    tensors=latent_tensors,
    unpack=without_predictors,
)
