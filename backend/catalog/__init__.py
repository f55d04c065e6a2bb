"""Models as files: where base models come from, what can be served, imports from PEFT, merges, champions."""

__all__ = [
    "champions",
    "checkpoint_index",
    "control_tokens",
    "merging",
    "model_card",
    "model_source",
    "peft_import",
]
