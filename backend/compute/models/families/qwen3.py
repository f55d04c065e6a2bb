"""Qwen3: a dense decoder with norms on each head of q and k."""

from functools import partial

from tinkerflow.backend.compute.models.decoder import decoder_config
from tinkerflow.backend.compute.models.families import Family

FAMILY = Family(model_type="qwen3", title="Qwen3", parse=partial(decoder_config, qk_norm=True))
