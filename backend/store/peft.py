"""The two files that make a folder a PEFT adapter, as `peft` and vLLM load it."""

from __future__ import annotations

import json
import re
from collections.abc import Collection

from tinkerflow.backend.commands import LORA_ALPHA, LoraSpec
from tinkerflow.backend.errors import StoreError
from tinkerflow.backend.ids import hub_name
from tinkerflow.backend.spec.ranks import peft_factor

ADAPTER = "adapter_model.safetensors"  # the name that PEFT looks for
ADAPTER_CONFIG = "adapter_config.json"
_EXPERT = re.compile(r"\.experts\.\d+\.")
_WEIGHT = re.compile(r"base_model\.model\.(?:[\w.]+\.)?(\w+)\.lora_[AB]\.weight")
_TEXT_MODEL = "language_model"
# The parameters of transformers 5, and the modules of an expert that each is made of.
_FUSED = (
    ("gate_up_proj", {"gate_proj", "up_proj"}),
    ("gate_up_proj", {"w1", "w3"}),
    ("down_proj", {"down_proj"}),
    ("down_proj", {"w2"}),
)


def adapter_config(base_model: str, spec: LoraSpec, weight_names: Collection[str]) -> bytes:
    """PEFT's `adapter_config.json` for an adapter with these tensors; StoreError for a name that is not PEFT's."""
    name, revision = hub_name(base_model) or (base_model, "")
    config = {
        "base_model_name_or_path": name,
        **({"revision": revision} if revision else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "lora_alpha": LORA_ALPHA,
        **_patterns(spec, weight_names),
        **_only_text(weight_names),
        "lora_dropout": 0.0,
        "modules_to_save": None,
        "peft_type": "LORA",
        "r": spec.rank,
        "target_modules": sorted({_module(name) for name in weight_names}),
        "task_type": "CAUSAL_LM",
        "use_rslora": False,
    }
    return (json.dumps(config, indent=2, sort_keys=True) + "\n").encode()


def _only_text(weight_names: Collection[str]) -> dict[str, str]:
    """exclude_modules of a text model that is part of another one, whose other parts have modules of the same names."""
    inside = any(f".{_TEXT_MODEL}." in name for name in weight_names)
    return {"exclude_modules": rf"(?!.*\b({_TEXT_MODEL}|lm_head)\b).*"} if inside else {}


def _patterns(spec: LoraSpec, weight_names: Collection[str]) -> dict[str, dict[str, float]]:
    """rank_pattern and alpha_pattern of experts whose rank is not that of the other matrices.

    The keys are the ends of names, and fit experts alone: each one's modules, and the parameters that transformers 5
    fuses those of a layer into. PEFT joins the adapters of the two that make one, and takes the first key that fits.
    """
    own = spec.expert_rank
    names = {_module(name) for name in weight_names if _EXPERT.search(name)} if own else set()
    if own is None or not names:
        return {}
    # The scale of the experts' update is LORA_ALPHA / own; a part of it is in their B.
    alpha = LORA_ALPHA / peft_factor(spec.rank, own)
    times = {rf"experts.\d+.{name}": 1 for name in sorted(names)}
    times |= {f"experts.{fused}": len(parts) for fused, parts in _FUSED if parts <= names}
    return {
        "rank_pattern": {name: own * many for name, many in times.items()},
        "alpha_pattern": {name: alpha * many for name, many in times.items()},
    }


def _module(weight_name: str) -> str:
    found = _WEIGHT.fullmatch(weight_name)
    if found is None:
        raise StoreError(
            f"tensor {weight_name!r}: PEFT's names are base_model.model.<module>.lora_A.weight and ...lora_B.weight"
        )
    return found[1]
