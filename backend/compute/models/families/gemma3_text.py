"""Gemma 3 (arXiv 2503.19786), the text model: windows in five of six layers, two rotary embeddings, GeGLU.

Norms are applied before and after attention and MLP.
"""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count, windows
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, SANDWICH_NORM, Attention, DecoderLayer, RMSNorm
from tinkerflow.backend.compute.models.rope import FULL, SLIDING, Rope, read_ropes

_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def _gemma3(fields: ConfigFields) -> ModelConfig:
    fields.refuse_others(
        hidden_activation="gelu_pytorch_tanh",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        use_bidirectional_attention=False,
    )
    norm = RMSNorm.read(fields, plus_one=True)
    attention = Attention.read(fields, rope_theta=_GLOBAL_THETA, one_rope=False, qk_norm="each head", norm=norm)
    scale = (attention.head_dim / fields.size("query_pre_attn_scalar", 256)) ** 0.5
    # Before transformers 5, a separate field held the base for layers with a window.
    rope = Rope(fields.number("rope_local_base_freq", _LOCAL_THETA), attention.head_dim)
    rope = read_ropes(fields, attention.head_dim, _LOCAL_THETA).get(SLIDING, rope)
    mlp = MLP.read(fields.without("hidden_act"), activation="gelu")
    every = fields.size("sliding_window_pattern", 6)
    usual = [SLIDING if (layer + 1) % every else FULL for layer in range(layer_count(fields))]
    layers = [
        replace(attention, query_scale=scale, window=window, rope=rope if window else attention.rope)
        for window in windows(fields, usual)
    ]
    decoder_layers = [DecoderLayer(layer, mlp, norm, SANDWICH_NORM) for layer in layers]
    return decoder(fields, norm, decoder_layers, tied=True, embed_scale=attention.hidden**0.5)


FAMILY = Family(model_type="gemma3_text", title="Gemma 3 (text)", parse=_gemma3)
