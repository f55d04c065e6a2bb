"""Mistral Small 3 and Ministral 3 as they are published: the text model, and a part that sees images (not loaded)."""

from tinkerflow.backend.compute.models.families.ministral3 import FAMILY as TEXT_MODEL
from tinkerflow.backend.compute.models.vision_text import inside

FAMILY = inside(TEXT_MODEL, model_type="mistral3", title="Mistral Small 3")
