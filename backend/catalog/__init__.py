"""Models as files: sources and cards of base models, imports from PEFT, merges, champions, and rollouts."""

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
