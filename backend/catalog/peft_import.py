"""Adapters that PEFT wrote: read, checked against the base model, and made into checkpoints that can be trained on.

PEFT scales the update of a module by lora_alpha / r. Ours have one alpha, so the quotient of the two goes into B, which
rounds nothing if it is a power of two.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import orjson

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import family_of, projections
from tinkerflow.backend.compute.models.peft_names import matrix_rank, modules, pair_names, targets
from tinkerflow.backend.core.errors import StoreError, UserError, shown
from tinkerflow.backend.core.ids import CheckpointKind, model_id
from tinkerflow.backend.spec.commands import LORA_ALPHA, AdapterState, LoraSpec
from tinkerflow.backend.spec.limits import MAX_RANK
from tinkerflow.backend.spec.ranks import peft_factor
from tinkerflow.backend.store import CheckpointMeta, CheckpointPath, Saved, Store
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, EXPERT, Floats, decode_any

NAME = "imported"  # of the checkpoint in its run
_HEADER_BYTES = 512  # of a tensor: its name, dtype, shape and place
_EXACT = {"peft_type": "LORA", "bias": "none"}
# Fields that do not change what the adapter computes, or that its tensors show.
_READ = {
    *("r", "lora_alpha", "rank_pattern", "alpha_pattern", "lora_dropout", "init_lora_weights", "qalora_group_size"),
    *("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern", "task_type", "auto_mapping"),
    *("base_model_name_or_path", "revision", "peft_version", "inference_mode", "megatron_config", "megatron_core"),
}
_INITS = (None, True, False, "gaussian", "orthogonal", "eva")  # the others change the base model's weights, too
_KEY = re.compile(r"\^?(experts\.\\d\+\.)?[\w.]+")
_SWITCHES = ("train_attn", "train_mlp", "train_unembed")  # of a LoraSpec


def import_adapter(cfg: ModelConfig, config: bytes, adapter: bytes, asked: LoraSpec | None = None) -> AdapterState:
    """The state to save for an adapter in PEFT's files; its optimizer starts fresh.

    cfg: the base model. config, adapter: the bytes of adapter_config.json and adapter_model.safetensors, of float32,
    float16 or bfloat16. asked: its rank and targets; None: as the files have them. UserError names the field or the
    tensor, its value and the rule, for whatever this service cannot compute or train.
    """
    values = _fields(config)
    try:
        tensors = decode_any(adapter)
    except StoreError as error:
        raise _wrong(ADAPTER, f"it is {error}") from error
    spec = _spec(cfg, values, tensors, asked)
    scales = _Scales(values)
    weights: dict[str, Floats] = {}
    for module, projection in modules(cfg, spec).items():
        own = matrix_rank(spec, projection)
        factor = scales.alpha(module, own) / LORA_ALPHA * peft_factor(spec.rank, own)
        shapes = (own, projection.inputs), (projection.outputs, own)
        for name, shape, scale in zip(pair_names(module), shapes, (1.0, factor), strict=True):
            weights[name] = _scaled(_checked(tensors, name, shape, cfg, spec), scale, name)
    if surplus := sorted(set(tensors) - set(weights)):
        raise _wrong(ADAPTER, f"tensor {surplus[0]!r} is no part of {_called(cfg, spec)}: must not be there")
    return AdapterState(spec, 0, weights)


def largest_size(cfg: ModelConfig, spec: LoraSpec) -> int:
    """The most bytes that adapter_model.safetensors of such an adapter can have: float32, experts of the whole rank."""
    each = [(projection, spec.rank) for projection in modules(cfg, replace(spec, expert_rank=None)).values()]
    numbers = sum(rank * (projection.inputs + projection.outputs) for projection, rank in each)
    return 4 * numbers + _HEADER_BYTES * (2 * len(each) + 8)


def save_import(
    store: Store,
    session_id: str,
    state: AdapterState,
    *,
    base_model: str,
    owner: str,
    name: str = NAME,
    request_id: str = "",
) -> Saved:
    """Commit an imported adapter as a training checkpoint of its own run; the same request again gives the same one.

    store: where. session_id: made for this import. state: of `import_adapter`. base_model: as clients call it. owner:
    the project. name: of the checkpoint. request_id: "" = the session is imported once. ConflictError when another
    request has saved something under the name.
    """
    meta = CheckpointMeta(base_model=base_model, owner=owner, request_id=request_id or session_id)
    path = import_path(session_id, name)
    return store.save(path.run_id, path.kind, path.name, state, meta)


def import_path(session_id: str, name: str = NAME) -> CheckpointPath:
    """Where the checkpoint of an import lies."""
    return CheckpointPath(model_id(session_id, 0), CheckpointKind.WEIGHTS, name)


def _fields(config: bytes) -> Mapping[str, Any]:
    """The fields of adapter_config.json; UserError for one that asks for something we do not compute."""
    try:
        values = orjson.loads(config)
        orjson.dumps(values)  # fails for what nests too deeply to be shown
    except (orjson.JSONDecodeError, orjson.JSONEncodeError) as error:
        raise _wrong(ADAPTER_CONFIG, f"it cannot be read as JSON ({error})") from error
    if not isinstance(values, dict):
        raise _wrong(ADAPTER_CONFIG, f"it holds a {type(values).__name__}: must be an object")
    for field, wanted in _EXACT.items():
        if values.get(field, wanted) != wanted:
            raise _wrong(ADAPTER_CONFIG, f"{field} is {shown(values[field])}: must be {wanted!r}")
    if (init := values.get("init_lora_weights")) not in _INITS:
        raise _wrong(ADAPTER_CONFIG, f"init_lora_weights is {shown(init)}: must not change the base model's weights")
    for field, value in values.items():
        if field not in _READ and field not in _EXACT and value:
            raise _wrong(ADAPTER_CONFIG, f"{field} is {shown(value)}: must be left out, it is not supported here")
    rank = values.get("r")
    if type(rank) is not int or not 1 <= rank <= MAX_RANK:
        raise _wrong(ADAPTER_CONFIG, f"r is {shown(rank)}: must be a whole number from 1 to {MAX_RANK}")
    return values


def _spec(
    cfg: ModelConfig, values: Mapping[str, Any], tensors: Mapping[str, Floats], asked: LoraSpec | None
) -> LoraSpec:
    """The adapter's shape: what was asked for, or what the files show; the rank of experts is the files' own."""
    rank = values["r"]
    if asked is None:
        none = LoraSpec(rank, **dict.fromkeys(_SWITCHES, False))
        each = {switch: replace(none, **{switch: True}) for switch in _SWITCHES}
        there = {
            switch: any(name in tensors for module in modules(cfg, spec) for name in pair_names(module))
            for switch, spec in each.items()
        }
        if not any(there.values()):
            example = next(iter(modules(cfg, LoraSpec(rank))))
            raise _wrong(
                ADAPTER, f"no tensor is that of a matrix of this base model, such as {pair_names(example)[0]!r}"
            )
        asked = replace(none, **there)
    elif asked.rank != rank:
        raise _wrong(ADAPTER_CONFIG, f"r is {rank}: must be {asked.rank}, lora_config.rank")
    of_experts = [name for name in targets(cfg, asked) if projections(cfg)[name].of_experts]
    if not of_experts:
        return asked
    projection = projections(cfg)[of_experts[0]]
    first = pair_names(projection.name((0, 0)))[0]
    own = next(iter(tensors[first].shape), 0) if first in tensors else rank
    if not 1 <= own <= rank:
        raise _wrong(ADAPTER, f"tensor {first!r} has rank {own}: must be 1 to r, {rank}")
    return replace(asked, expert_rank=None if own == rank else own)


class _Scales:
    """rank_pattern and alpha_pattern of a config: of every module the first key that is the end of its name."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        """UserError for a key that is not the end of a name, and for values that are no sizes."""
        self._rank, self._alpha = values["r"], _alpha("lora_alpha", values.get("lora_alpha", 8))
        self._ranks, self._alphas = (_pattern(values, field) for field in ("rank_pattern", "alpha_pattern"))

    def alpha(self, module: str, own: int) -> float:
        """The alpha of a module whose tensors have the rank `own`; UserError when the config gives it another rank."""
        if (rank := _of(self._ranks, module, self._rank)) != own:
            raise _wrong(ADAPTER_CONFIG, f"the rank of {module!r} is {rank!r}: must be {own}, that of its tensors")
        return _alpha(f"alpha_pattern of {module!r}", _of(self._alphas, module, self._alpha))


def _pattern(values: Mapping[str, Any], field: str) -> Mapping[str, tuple[int, Any]]:
    """The keys of a pattern; of each, which one it is, and its value."""
    pattern = values.get(field) or {}
    if not isinstance(pattern, dict):
        raise _wrong(ADAPTER_CONFIG, f"{field} is {shown(pattern)}: must be an object")
    for key in pattern:
        if not _KEY.fullmatch(key):
            raise _wrong(ADAPTER_CONFIG, f"{field} has the key {shown(key)}: must be a module's name or the end of one")
    return {key: (place, value) for place, (key, value) in enumerate(pattern.items())}


def _of(pattern: Mapping[str, tuple[int, Any]], module: str, default: Any) -> Any:
    """The value of the first key that fits a module, as PEFT looks it up (`get_pattern_key`).

    A hundred thousand keys take no longer than one.
    """
    keys = [f"^{module}"]
    for name in {module, EXPERT.sub(r".experts.\\d+.", module)}:  # the second as keys call all experts
        parts = name.split(".")
        keys += (".".join(parts[n:]) for n in range(len(parts)))
    return min((pattern[key] for key in keys if key in pattern), default=(0, default))[1]


def _alpha(field: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise _wrong(ADAPTER_CONFIG, f"{field} is {shown(value)}: must be a number above 0")
    return float(value)


def _checked(
    tensors: Mapping[str, Floats], name: str, shape: tuple[int, int], cfg: ModelConfig, spec: LoraSpec
) -> Floats:
    array = tensors.get(name)
    if array is None or array.shape != shape:
        found = "is missing" if array is None else f"has shape {array.shape}"
        raise _wrong(ADAPTER, f"tensor {name!r} {found}: must be there with shape {shape}, for {_called(cfg, spec)}")
    return array


def _scaled(array: Floats, scale: float, name: str) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = array if scale == 1 else array * np.float32(scale)
    if not np.isfinite(scaled).all():
        times = "" if scale == 1 else f", times {scale:g} for its alpha,"
        raise _wrong(ADAPTER, f"tensor {name!r}{times} holds a number that is not finite: must be finite")
    return scaled


def _called(cfg: ModelConfig, spec: LoraSpec) -> str:
    parts = ", ".join(part for part in _SWITCHES if getattr(spec, part))
    return f"an adapter of rank {spec.rank} with {parts} on this {family_of(cfg).title} model"


def _wrong(file: str, why: str) -> UserError:
    return UserError(f"{file}: {why}")
