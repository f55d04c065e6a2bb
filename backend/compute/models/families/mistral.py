"""Mistral: a dense decoder; in its first releases every layer has a sliding window."""

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import FULL, SLIDING, decoder_config, windowed
from tinkerflow.backend.compute.models.families import Family


def parse_mistral(fields: ConfigFields) -> ModelConfig:
    """The config of a decoder whose layers all have a window if `sliding_window` is set."""
    config = decoder_config(fields)
    kind = FULL if fields.get("sliding_window") is None else SLIDING
    return windowed(fields, config, [kind] * config.layers)


FAMILY = Family(model_type="mistral", title="Mistral", parse=parse_mistral)
