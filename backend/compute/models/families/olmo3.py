"""OLMo 3: OLMo 2 with a sliding window in three of four layers, and YaRN in the others.

transformers 5 applies YaRN in every layer; the model was trained, and vLLM computes it, with YaRN in layers without a
window only.
"""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import FULL, SLIDING, windowed
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.families.olmo2 import olmo_tensors, parse_olmo


def _parse(fields: ConfigFields) -> ModelConfig:
    plain = parse_olmo(fields)
    config = windowed(fields, plain, [SLIDING if (layer + 1) % 4 else FULL for layer in range(plain.layers)])
    short = replace(config.rope, scaling=None)
    return replace(config, kinds=tuple(replace(one, rope=short) if one.window else one for one in config.layer_kinds))


FAMILY = Family(model_type="olmo3", title="OLMo 3", parse=_parse, tensors=olmo_tensors)
