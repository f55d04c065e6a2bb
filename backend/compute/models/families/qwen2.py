"""Qwen2 and Qwen2.5: a dense decoder with biases on q, k and v."""

from functools import partial

from tinkerflow.backend.compute.models.decoder import decoder_config
from tinkerflow.backend.compute.models.families import Family

FAMILY = Family(model_type="qwen2", title="Qwen2.5", parse=partial(decoder_config, qkv_bias=True))
