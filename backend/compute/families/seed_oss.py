"""Seed-OSS: a dense decoder with biases on q, k and v."""

from tinkerflow.backend.compute.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.decoder import decoder_config
from tinkerflow.backend.compute.families import Family


def _parse(fields: ConfigFields) -> ModelConfig:
    fields.refuse_others(attention_out_bias=False)
    return decoder_config(fields, qkv_bias=bool(fields.get("attention_bias", True)), computed=("attention_bias",))


FAMILY = Family(model_type="seed_oss", title="Seed-OSS", parse=_parse)
