"""The two files that make a folder a PEFT adapter, as `peft` and vLLM load it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable

from tinkerflow.backend.commands import LORA_ALPHA, LoraSpec
from tinkerflow.backend.errors import StoreError

ADAPTER = "adapter_model.safetensors"  # the name that PEFT looks for
ADAPTER_CONFIG = "adapter_config.json"
_WEIGHT = re.compile(r"base_model\.model\.(?:[\w.]+\.)?(\w+)\.lora_[AB]\.weight")


def adapter_config(base_model: str, spec: LoraSpec, weight_names: Iterable[str]) -> bytes:
    """PEFT's `adapter_config.json` for an adapter with these tensors; StoreError for a name that is not PEFT's."""
    config = {
        "base_model_name_or_path": base_model,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": LORA_ALPHA,
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": spec.rank,
        "target_modules": sorted({_module(name) for name in weight_names}),
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _module(weight_name: str) -> str:
    found = _WEIGHT.fullmatch(weight_name)
    if found is None:
        raise StoreError(
            f"tensor {weight_name!r}: PEFT's names are base_model.model.<module>.lora_A.weight and ...lora_B.weight"
        )
    return found[1]
