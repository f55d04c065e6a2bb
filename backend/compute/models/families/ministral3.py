"""Ministral 3: Mistral with YaRN, and queries that grow with the logarithm of the position.

The growth does not depend on the rope_type. Other families ignore its field, as in transformers.
"""

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families.mistral import FAMILY as MISTRAL
from tinkerflow.backend.compute.models.families.mistral import mistral
from tinkerflow.backend.compute.models.fields import ConfigFields

_ROPE = {  # transformers' default
    "rope_type": "yarn",
    "rope_theta": 1_000_000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16_384,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}


def _ministral3(fields: ConfigFields) -> ModelConfig:
    fields = fields if fields.rope else fields.with_values(rope_parameters=_ROPE)
    own, beta, period = replace(fields, values=fields.rope), "llama_4_scaling_beta", "original_max_position_embeddings"
    if not own.get(beta):
        return mistral(fields, eps=1e-5)
    default = fields.size(period, fields.size("max_position_embeddings"))
    return mistral(fields, eps=1e-5, growth=(own.number(beta, 0.0), own.size(period, default)))


FAMILY = replace(MISTRAL, model_type="ministral3", title="Ministral 3", parse=_ministral3)
