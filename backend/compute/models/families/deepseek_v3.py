"""DeepSeek V3 (arXiv 2412.19437), R1 and Moonlight: latent attention, and sigmoid-routed experts."""

from collections.abc import Mapping
from functools import partial

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import LatentAttention, RMSNorm
from tinkerflow.backend.compute.models.routed import routed_layers, without_predictors

_DEFAULTS = {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "q_lora_rank": 1536}  # of transformers


def deepseek_v3(
    fields: ConfigFields, *, eps: float = 1e-6, scale: float = 2.5, defaults: Mapping[str, int] = {}
) -> ModelConfig:
    """The decoder of a `config.json`.

    eps, scale: defaults for the norms' epsilon and for the scale of experts' shares. defaults: values for other fields.
    """
    fields = fields.with_defaults(**defaults)
    norm = RMSNorm.read(fields, eps)
    return decoder(fields, norm, routed_layers(fields, LatentAttention.read(fields), norm, scale))


FAMILY = Family(
    model_type="deepseek_v3",
    title="DeepSeek V3",
    parse=partial(deepseek_v3, defaults=_DEFAULTS),
    unpack=without_predictors,
)
