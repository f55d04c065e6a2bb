"""Decoder models as pure functions on pytrees: configs, families, layers, adapters and images.

`config`, `families` and the modules that they import do not load JAX, so the API and the engine can import them.
"""

__all__ = [
    "checkpoints",
    "config",
    "families",
    "family",
    "layer_loop",
    "layers",
    "long_rows",
    "lora",
    "lora_weights",
    "params",
    "peft_names",
    "transformer",
    "vision_config",
    "vision_tower",
]
