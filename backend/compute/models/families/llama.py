"""Llama 3 (arXiv 2407.21783): a dense decoder, with Llama 3's rule for scaling rotary frequencies."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, Attention, DecoderLayer, RMSNorm


def llama(fields: ConfigFields) -> ModelConfig:
    """The decoder of a `config.json`."""
    norm = RMSNorm.read(fields)
    layer = DecoderLayer(Attention.read(fields), MLP.read(fields), norm)
    return decoder(fields, norm, [layer] * layer_count(fields))


FAMILY = Family(model_type="llama", title="Llama 3", parse=llama)
