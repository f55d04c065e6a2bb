"""SmolLM3: a dense decoder in which some layers have no rotary embedding."""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import FULL, SLIDING, decoder_config, windowed
from tinkerflow.backend.compute.models.families import Family


def _parse(fields: ConfigFields) -> ModelConfig:
    config = decoder_config(fields, rope_theta=2_000_000.0, tied=True, computed=("use_sliding_window",))
    interval = fields.size("no_rope_layer_interval", 4)
    rotary = fields.get("no_rope_layers") or [int((layer + 1) % interval != 0) for layer in range(config.layers)]
    if len(rotary) < config.layers:
        raise fields.error(f"no_rope_layers has {len(rotary)} entries; must be at least {config.layers}")
    if fields.get("use_sliding_window"):
        config = windowed(fields, config, [FULL if one else SLIDING for one in rotary[: config.layers]])
    kinds = zip(config.layer_kinds, rotary, strict=False)
    return replace(config, kinds=tuple(kind if one else replace(kind, rope=None) for kind, one in kinds))


FAMILY = Family(model_type="smollm3", title="SmolLM3", parse=_parse)
