"""Ministral 3: Mistral with YaRN, and queries that grow with the logarithm of the position."""

from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.families.mistral import parse_mistral

FAMILY = Family(model_type="ministral3", title="Ministral 3", parse=parse_mistral)
