"""Mistral Small 3 and Ministral 3 as published: the text model, without the vision tower in their files."""

from tinkerflow.backend.compute.models.families.ministral3 import FAMILY as MINISTRAL3
from tinkerflow.backend.compute.models.families.mistral import FAMILY as MISTRAL
from tinkerflow.backend.compute.models.vision_text import with_unused_tower

FAMILY = with_unused_tower(MISTRAL, MINISTRAL3, model_type="mistral3", title="Mistral Small 3")
