"""OLMo 2: a dense decoder with norms behind attention and MLP, and over all heads of q and k together."""

from dataclasses import replace
from functools import partial

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import POST_NORMS, decoder_config, decoder_tensors
from tinkerflow.backend.compute.models.families import Family

olmo_tensors = partial(decoder_tensors, norms=POST_NORMS)


def parse_olmo(fields: ConfigFields) -> ModelConfig:
    """The config of a decoder with norms over all heads of q and k."""
    return replace(decoder_config(fields), qk_norm_whole=True)


FAMILY = Family(model_type="olmo2", title="OLMo 2", parse=parse_olmo, tensors=olmo_tensors)
