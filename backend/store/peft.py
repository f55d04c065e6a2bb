"""The tensors and the config that make a folder a PEFT adapter, which `peft` and vLLM can load.

Other tensor files, such as the optimizer's moments, are written and read the same way.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError, deserialize
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.core.ids import hub_name
from tinkerflow.backend.spec.commands import LORA_ALPHA, LoraSpec
from tinkerflow.backend.spec.ranks import peft_factor

Floats = npt.NDArray[np.float32]
ADAPTER = "adapter_model.safetensors"  # the name that PEFT looks for
ADAPTER_CONFIG = "adapter_config.json"
EXPERT = re.compile(r"\.experts\.\d+\.")
_WEIGHT = re.compile(r"base_model\.model\.(?:[\w.]+\.)?(\w+)\.lora_[AB]\.weight")
_TEXT_MODEL = "language_model"
# The fused parameters of transformers 5, and the modules of an expert that each consists of.
_FUSED = (
    ("gate_up_proj", {"gate_proj", "up_proj"}),
    ("gate_up_proj", {"w1", "w3"}),
    ("down_proj", {"down_proj"}),
    ("down_proj", {"w2"}),
)


# ------------------------------------------------------------------ the config
def adapter_config(base_model: str, spec: LoraSpec, weight_names: Collection[str]) -> bytes:
    """PEFT's `adapter_config.json` for an adapter with these tensors. StoreError: a name is not PEFT's."""
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
    """exclude_modules for a text model inside a larger model whose other parts contain modules of the same names."""
    inside = any(f".{_TEXT_MODEL}." in name for name in weight_names)
    return {"exclude_modules": rf"(?!.*\b({_TEXT_MODEL}|lm_head)\b).*"} if inside else {}


def _patterns(spec: LoraSpec, weight_names: Collection[str]) -> dict[str, dict[str, float]]:
    """rank_pattern and alpha_pattern for experts with another rank than the other matrices.

    The keys are ends of names that match only experts: the modules of each expert, and the parameters into which
    transformers 5 fuses the modules of a layer. PEFT joins the adapters of two modules that form one parameter, and
    uses the first key that matches.
    """
    own = spec.expert_rank
    names = {_module(name) for name in weight_names if EXPERT.search(name)} if own else set()
    if own is None or not names:
        return {}
    # The scale of the experts' update is LORA_ALPHA / own. A part of this scale is contained in their B.
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


# ------------------------------------------------------------------ the tensors
def encode(tensors: Mapping[str, Floats]) -> bytes:
    """Encode named float32 tensors as a safetensors file. StoreError: names a tensor of another dtype."""
    for name, array in tensors.items():
        if array.dtype != np.float32:
            raise StoreError(f"tensor {name!r} is {array.dtype}; checkpoints contain float32")
    # safetensors 0.8.0 silently writes wrong bytes for arrays that are not contiguous, such as transposes and slices.
    data: bytes = save_safetensors({k: np.ascontiguousarray(a) for k, a in tensors.items()}, metadata={"format": "pt"})
    return data


def decode(data: bytes) -> dict[str, Floats]:
    """The inverse of `encode`. StoreError: the bytes are not a safetensors file of float32 tensors."""
    try:
        tensors: dict[str, Floats] = load_safetensors(data)
    except (SafetensorError, ValueError, KeyError) as error:
        raise StoreError(f"not a safetensors file ({error})") from error
    for name, array in tensors.items():
        if array.dtype != np.float32:
            raise StoreError(f"not of a checkpoint: tensor {name!r} is {array.dtype}; checkpoints contain float32")
    return tensors


def decode_any(data: bytes) -> dict[str, Floats]:
    """The tensors of a foreign safetensors file, as float32. StoreError: a tensor is not F32, F16 or BF16."""
    try:
        found = deserialize(data)  # type: ignore[no-untyped-call]
    except (SafetensorError, ValueError) as error:
        raise StoreError(f"not a safetensors file ({error})") from error
    return {name: _widened(name, each["dtype"], each["data"]).reshape(each["shape"]) for name, each in found}


def _widened(name: str, dtype: str, raw: bytearray) -> Floats:
    if dtype == "BF16":  # the upper half of a float32
        return (np.frombuffer(raw, "<u2").astype("<u4") << 16).view(np.float32)
    if dtype == "F16":
        return np.frombuffer(raw, "<f2").astype(np.float32)
    if dtype == "F32":
        return np.frombuffer(raw, "<f4")
    raise StoreError(f"not of an adapter: tensor {name!r} is {dtype}; it must be F32, F16 or BF16")
