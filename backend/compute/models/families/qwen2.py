"""Qwen2 and Qwen2.5 (arXiv 2412.15115): a dense decoder with biases on q, k and v."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, Attention, DecoderLayer, RMSNorm


def qwen2(fields: ConfigFields) -> ModelConfig:
    """The decoder of a `config.json`."""
    norm = RMSNorm.read(fields)
    layer = DecoderLayer(Attention.read(fields, biases=("q", "k", "v")), MLP.read(fields), norm)
    return decoder(fields, norm, [layer] * layer_count(fields))


FAMILY = Family(model_type="qwen2", title="Qwen2.5", parse=qwen2)
