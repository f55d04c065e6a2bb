"""Files of models: base models and their cards, PEFT imports, merges, champions and rollouts."""

__all__ = [
    "card",
    "champions",
    "checkpoint_index",
    "control_tokens",
    "history",
    "known_models",
    "merging",
    "model_card",
    "model_source",
    "openlineage",
    "peft_import",
    "receipt",
    "rollouts",
]
