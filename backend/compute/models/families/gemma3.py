"""Gemma 3 with 4B parameters or more: the text model, without the vision tower in its files."""

from tinkerflow.backend.compute.models.families.gemma3_text import FAMILY as TEXT_MODEL
from tinkerflow.backend.compute.models.vision_text import with_unused_tower

# transformers' defaults, which Google's files leave out.
_DEFAULTS = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131_072,
    "sliding_window": 4096,
}

FAMILY = with_unused_tower(TEXT_MODEL, model_type="gemma3", title="Gemma 3", defaults=_DEFAULTS)
