"""Ministral 3: Mistral with YaRN, and queries that grow with the logarithm of the position."""

from dataclasses import replace
from functools import partial

from tinkerflow.backend.compute.models.families.mistral import FAMILY as MISTRAL
from tinkerflow.backend.compute.models.families.mistral import mistral

FAMILY = replace(MISTRAL, model_type="ministral3", title="Ministral 3", parse=partial(mistral, eps=1e-5))
