"""OLMo 3: OLMo 2 with a sliding window in three of four layers, and YaRN in the others.

The model was trained with YaRN only in layers without a window, and vLLM applies it in the same layers. transformers
5.24 writes the embedding of each type of layer. Earlier releases write one, and apply YaRN in every layer.
"""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count, windows
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, POST_NORM, Attention, DecoderLayer, RMSNorm
from tinkerflow.backend.compute.models.rope import FULL, SLIDING, read_ropes


def _olmo3(fields: ConfigFields) -> ModelConfig:
    if not fields.rope:  # no default, because releases of transformers differ
        fields = fields.with_values(rope_theta=fields["rope_theta"])
    norm, mlp = RMSNorm.read(fields, eps=1e-5), MLP.read(fields)
    attention = Attention.read(fields, one_rope=False, qk_norm="all heads", norm=norm)
    assert attention.rope is not None
    ropes = read_ropes(fields, attention.head_dim)
    plain = ropes.get(SLIDING) or replace(attention.rope, scaling=None)
    usual = [SLIDING if (layer + 1) % 4 else FULL for layer in range(layer_count(fields))]
    layers = [
        replace(attention, window=window, rope=plain) if window else attention for window in windows(fields, usual)
    ]
    return decoder(fields, norm, [DecoderLayer(layer, mlp, norm, POST_NORM) for layer in layers])


FAMILY = Family(model_type="olmo3", title="OLMo 3", parse=_olmo3)
