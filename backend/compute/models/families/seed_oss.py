"""Seed-OSS: a dense decoder with biases on q, k and v."""

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count
from tinkerflow.backend.compute.models.family import Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, Attention, DecoderLayer, RMSNorm


def _seed_oss(fields: ConfigFields) -> ModelConfig:
    fields.refuse_others(attention_out_bias=False)
    biases = ("q", "k", "v") if fields.flag("attention_bias", True) else ()
    norm = RMSNorm.read(fields)
    attention = Attention.read(fields.without("attention_bias"), biases=biases)
    return decoder(fields, norm, [DecoderLayer(attention, MLP.read(fields), norm)] * layer_count(fields))


FAMILY = Family(model_type="seed_oss", title="Seed-OSS", parse=_seed_oss)
