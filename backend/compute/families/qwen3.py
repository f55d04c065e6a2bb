"""Qwen3: a dense decoder with norms on each head of q and k."""

from tinkerflow.backend.compute.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.decoder import decoder_config
from tinkerflow.backend.compute.families import Family


def _parse(fields: ConfigFields) -> ModelConfig:
    return decoder_config(fields, qk_norm=True)


FAMILY = Family(model_type="qwen3", title="Qwen3", parse=_parse)
