"""Qwen2 and Qwen2.5: a dense decoder with biases on q, k and v."""

from tinkerflow.backend.compute.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.decoder import decoder_config
from tinkerflow.backend.compute.families import Family


def _parse(fields: ConfigFields) -> ModelConfig:
    return decoder_config(fields, qkv_bias=True)


FAMILY = Family(model_type="qwen2", title="Qwen2.5", parse=_parse)
