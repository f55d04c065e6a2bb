"""Qwen3 (arXiv 2505.09388): a dense decoder with norms on each head of q and k.

Each layer is x + attention(norm(x)), then x + mlp(norm(x)).
"""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, PRE_NORM, Attention, DecoderLayer, RMSNorm


def qwen3(fields: ConfigFields, *, rope_theta: float = 10_000.0) -> ModelConfig:
    """The decoder of a `config.json`. rope_theta: the default if the file sets none."""
    norm = RMSNorm.read(fields, eps=1e-6)
    attention = Attention.read(fields, rope_theta=rope_theta, qk_norm="each head", norm=norm)  # grouped queries, RoPE
    mlp = MLP.read(fields, activation="silu")  # SwiGLU
    layer = DecoderLayer(attention, mlp, norm, PRE_NORM)
    return decoder(fields, norm, [layer] * layer_count(fields))


FAMILY = Family(model_type="qwen3", title="Qwen3", parse=qwen3)
