"""DeepSeek V3 (arXiv 2412.19437), R1 and Moonlight: latent attention, and sigmoid-routed experts."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import LatentAttention, RMSNorm
from tinkerflow.backend.compute.models.routed import routed_layers, without_predictors


def deepseek_v3(fields: ConfigFields, *, eps: float = 1e-6, scale: float = 2.5) -> ModelConfig:
    """The decoder of a `config.json`. eps, scale: of norms and of experts' shares, if the file sets none."""
    norm = RMSNorm.read(fields, eps)
    return decoder(fields, norm, routed_layers(fields, LatentAttention.read(fields), norm, scale))


FAMILY = Family(model_type="deepseek_v3", title="DeepSeek V3", parse=deepseek_v3, unpack=without_predictors)
