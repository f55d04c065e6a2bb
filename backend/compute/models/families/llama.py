"""Llama 3: a dense decoder, its rotary frequencies stretched by Llama 3's rule."""

from tinkerflow.backend.compute.models.decoder import decoder_config
from tinkerflow.backend.compute.models.families import Family

FAMILY = Family(model_type="llama", title="Llama 3", parse=decoder_config)
