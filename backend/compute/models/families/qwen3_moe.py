"""Qwen3-MoE (arXiv 2505.09388): Qwen3 with a mixture of experts instead of every layer's MLP."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import Attention, DecoderLayer, Experts, RMSNorm


def qwen3_moe(fields: ConfigFields, *, normalized: bool = False, rope_theta: float = 10_000.0) -> ModelConfig:
    """The decoder of a `config.json`. normalized (`norm_topk_prob`), rope_theta: defaults."""
    norm = RMSNorm.read(fields)
    attention = Attention.read(fields, rope_theta=rope_theta, qk_norm="each head", norm=norm)
    layer = DecoderLayer(attention, Experts.read(fields, normalized=normalized), norm)
    return decoder(fields, norm, [layer] * layer_count(fields))


FAMILY = Family(model_type="qwen3_moe", title="Qwen3-MoE", parse=qwen3_moe)
