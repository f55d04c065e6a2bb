"""OLMo 2 (arXiv 2501.00656): norms after attention and MLP instead of before them, and over all heads of q and of k."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, POST_NORM, Attention, DecoderLayer, RMSNorm


def olmo2(fields: ConfigFields) -> ModelConfig:
    """The decoder of a `config.json`."""
    norm = RMSNorm.read(fields, eps=1e-5)
    attention = Attention.read(fields, qk_norm="all heads", norm=norm)
    layer = DecoderLayer(attention, MLP.read(fields), norm, POST_NORM)
    return decoder(fields, norm, [layer] * layer_count(fields))


FAMILY = Family(model_type="olmo2", title="OLMo 2", parse=olmo2)
