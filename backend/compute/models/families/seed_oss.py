"""Seed-OSS: a dense decoder with biases on q, k and v."""

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder_config
from tinkerflow.backend.compute.models.families import Family


def _parse(fields: ConfigFields) -> ModelConfig:
    fields.refuse_others(attention_out_bias=False)
    return decoder_config(fields, qkv_bias=bool(fields.get("attention_bias", True)), computed=("attention_bias",))


FAMILY = Family(model_type="seed_oss", title="Seed-OSS", parse=_parse)
