"""Gemma 3, the text model: windows in five of six layers, two rotary embeddings, norms before and behind, GeGLU."""

from dataclasses import replace
from functools import partial

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import (
    FULL,
    SLIDING,
    decoder_config,
    decoder_tensors,
    read_ropes,
    windowed,
)
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.rope import Rope

_NORMS = {
    "attn_norm": "input_layernorm",
    "attn_out_norm": "post_attention_layernorm",
    "mlp_norm": "pre_feedforward_layernorm",
    "mlp_out_norm": "post_feedforward_layernorm",
}
gemma_tensors = partial(decoder_tensors, norms=_NORMS)
_GLOBAL_THETA, _LOCAL_THETA = 1_000_000.0, 10_000.0


def _parse(fields: ConfigFields) -> ModelConfig:
    fields.refuse_others(
        hidden_activation="gelu_pytorch_tanh",
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        use_bidirectional_attention=False,
    )
    config = decoder_config(fields, qk_norm=True, rope_theta=_GLOBAL_THETA, tied=True, computed=("hidden_act",))
    config = replace(
        config,
        gelu=True,
        norm_plus_one=True,
        embed_scale=config.hidden**0.5,
        query_scale=(config.head_dim / fields.size("query_pre_attn_scalar", 256)) ** 0.5,
    )
    every = fields.size("sliding_window_pattern", 6)
    config = windowed(fields, config, [SLIDING if (layer + 1) % every else FULL for layer in range(config.layers)])
    # Releases before transformers 5 wrote the base of the layers with a window beside the other one.
    own = Rope(float(fields.get("rope_local_base_freq") or _LOCAL_THETA), config.head_dim)
    local = read_ropes(fields, config.head_dim, _LOCAL_THETA).get(SLIDING, own)
    return replace(config, kinds=tuple(replace(one, rope=local) if one.window else one for one in config.layer_kinds))


FAMILY = Family(model_type="gemma3_text", title="Gemma 3 (text)", parse=_parse, tensors=gemma_tensors)
