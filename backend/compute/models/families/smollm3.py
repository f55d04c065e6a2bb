"""SmolLM3: a dense decoder in which some layers do not encode positions (NoPE)."""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count, windows
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, Attention, DecoderLayer, RMSNorm
from tinkerflow.backend.compute.models.rope import FULL, SLIDING


def _smollm3(fields: ConfigFields) -> ModelConfig:
    count, interval = layer_count(fields), fields.size("no_rope_layer_interval", 4)
    rotary = fields.items("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(count)]
    if len(rotary) < count or any(one not in (0, 1) for one in rotary):
        raise fields.error(f"no_rope_layers {rotary!r}; must be at least {count} of 0 and 1")
    usual = [FULL if one else SLIDING for one in rotary[:count]]
    window = windows(fields, usual) if fields.flag("use_sliding_window") else [None] * count
    norm, mlp = RMSNorm.read(fields), MLP.read(fields)
    attention = Attention.read(fields.without("use_sliding_window"), rope_theta=2_000_000.0)
    layers = [
        DecoderLayer(
            replace(attention, window=window[layer], rope=attention.rope if rotary[layer] else None), mlp, norm
        )
        for layer in range(count)
    ]
    return decoder(fields, norm, layers, tied=True)


FAMILY = Family(model_type="smollm3", title="SmolLM3", parse=_smollm3)
