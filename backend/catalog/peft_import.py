"""Imports PEFT adapters: checks them against the base model, and converts them to checkpoints for further training.

PEFT scales the update of a module by lora_alpha / r. Our adapters share one alpha, so B is multiplied by the quotient
of the two scales. A power of two causes no rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from tinkerflow.backend.catalog.peft_config import Scales, Targets, read_fields, wrong_file
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import family_of, projections
from tinkerflow.backend.compute.models.family import LANGUAGE_MODEL, TEXT_MODEL
from tinkerflow.backend.compute.models.peft_names import PEFT, matrix_rank, modules, pair_names, targets
from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.core.ids import IMPORTED, CheckpointKind, model_id
from tinkerflow.backend.spec.commands import LORA_ALPHA, AdapterState, LoraSpec
from tinkerflow.backend.spec.ranks import peft_factor
from tinkerflow.backend.store import CheckpointMeta, CheckpointPath, Saved, Store
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, Floats, decode_any

_HEADER_BYTES = 512  # of a tensor: its name, dtype, shape and place
_COPY = ".base_layer.weight"  # PEFT adds the base model's own unembedding to files with an adapter of it
_SWITCHES = ("train_attn", "train_mlp", "train_unembed")  # of a LoraSpec


def import_adapter(cfg: ModelConfig, config: bytes, adapter: bytes, asked: LoraSpec | None = None) -> AdapterState:
    """Convert an adapter in PEFT's files to a state to save. The optimizer starts fresh.

    cfg: the base model. config, adapter: the bytes of adapter_config.json and adapter_model.safetensors, of float32,
    float16 or bfloat16. asked: the requested rank and targets; None: those of the files. If the base model also takes
    images, the modules may have the names that they have in its text model alone. UserError: this service cannot
    compute or train a field or tensor; the error names it, its value and the rule.
    """
    values = read_fields(config)
    try:
        tensors = decode_any(adapter)
    except StoreError as error:
        raise wrong_file(ADAPTER, f"it is {error}") from error
    prefixes = family_of(cfg).names.model, _prefix(cfg, tensors)
    spec = _spec(cfg, values, tensors, asked, prefixes)
    scales = Scales(values)
    weights: dict[str, Floats] = {}
    adapted = {_stored(module, prefixes): (module, each) for module, each in modules(cfg, spec).items()}
    for stored, (module, projection) in adapted.items():
        own = matrix_rank(spec, projection)
        factor = scales.alpha(stored, own) / LORA_ALPHA * peft_factor(spec.rank, own)
        shapes = (own, projection.inputs), (projection.outputs, own)
        for name, there, shape, scale in zip(
            pair_names(module), pair_names(stored), shapes, (1.0, factor), strict=True
        ):
            weights[name] = _scaled(_checked(tensors, there, shape, cfg, spec), scale, there)
    unembed = projections(cfg)["unembed"].module
    Targets(values, unembed).check(adapted)
    known = {name for stored in adapted for name in (*pair_names(stored), f"{PEFT}{stored}{_COPY}")}
    if surplus := sorted(set(tensors) - known):
        raise wrong_file(ADAPTER, f"tensor {surplus[0]!r} is not part of {_called(cfg, spec)}: must be absent")
    return AdapterState(spec, 0, weights)


def largest_size(cfg: ModelConfig, spec: LoraSpec) -> int:
    """The largest possible size of adapter_model.safetensors in bytes: in float32, with experts of full rank."""
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
    name: str = IMPORTED,
    request_id: str = "",
) -> Saved:
    """Commit an imported adapter as a training checkpoint of its own run. Repeating a request returns its checkpoint.

    session_id: of the import. state: from `import_adapter`. base_model: the name for clients. owner: the project. name:
    of the checkpoint. request_id: "" = the session is imported once. ConflictError: another request has used the name.
    """
    meta = CheckpointMeta(base_model=base_model, owner=owner, request_id=request_id or session_id)
    path = import_path(session_id, name)
    return store.save(path.run_id, path.kind, path.name, state, meta)


def import_path(session_id: str, name: str = IMPORTED) -> CheckpointPath:
    return CheckpointPath(model_id(session_id, 0), CheckpointKind.WEIGHTS, name)


def _prefix(cfg: ModelConfig, tensors: Collection[str]) -> str:
    """The prefix of the names of the text model's modules in the files.

    AutoModelForCausalLM loads Qwen3.5 without the parts for images, and so under other names than those of its files.
    """
    own = family_of(cfg).names.model
    alone = own == LANGUAGE_MODEL.model and any(name.startswith(f"{PEFT}{TEXT_MODEL.model}layers.") for name in tensors)
    return TEXT_MODEL.model if alone else own


def _stored(module: str, prefixes: tuple[str, str]) -> str:
    """The name of a module in the files. prefixes: of the text model's modules, ours and that in the files."""
    ours, there = prefixes
    return there + module.removeprefix(ours) if module.startswith(ours) else module


def _spec(
    cfg: ModelConfig,
    values: Mapping[str, Any],
    tensors: Mapping[str, Floats],
    asked: LoraSpec | None,
    prefixes: tuple[str, str],
) -> LoraSpec:
    """The adapter's shape: as requested, or else as in the files. The rank of experts comes from the files."""
    rank = values["r"]
    if asked is None:
        none = LoraSpec(rank, **dict.fromkeys(_SWITCHES, False))
        each = {switch: replace(none, **{switch: True}) for switch in _SWITCHES}
        there = {
            switch: any(
                name in tensors for module in modules(cfg, spec) for name in pair_names(_stored(module, prefixes))
            )
            for switch, spec in each.items()
        }
        if not any(there.values()):
            example = next(iter(modules(cfg, LoraSpec(rank))))
            raise wrong_file(
                ADAPTER, f"no tensor belongs to a matrix of this base model, such as {pair_names(example)[0]!r}"
            )
        asked = replace(none, **there)
    elif asked.rank != rank:
        raise wrong_file(ADAPTER_CONFIG, f"r is {rank}: must be {asked.rank}, lora_config.rank")
    of_experts = [name for name in targets(cfg, asked) if projections(cfg)[name].of_experts]
    if not of_experts:
        return asked
    projection = projections(cfg)[of_experts[0]]
    first = pair_names(_stored(projection.name((0, 0)), prefixes))[0]
    own = next(iter(tensors[first].shape), 0) if first in tensors else rank
    if not 1 <= own <= rank:
        raise wrong_file(ADAPTER, f"tensor {first!r} has rank {own}: must be 1 to r, {rank}")
    return replace(asked, expert_rank=None if own == rank else own)


def _checked(
    tensors: Mapping[str, Floats], name: str, shape: tuple[int, int], cfg: ModelConfig, spec: LoraSpec
) -> Floats:
    array = tensors.get(name)
    if array is None or array.shape != shape:
        found = "is missing" if array is None else f"has shape {array.shape}"
        raise wrong_file(ADAPTER, f"tensor {name!r} {found}: must exist with shape {shape}, for {_called(cfg, spec)}")
    return array


def _scaled(array: Floats, scale: float, name: str) -> Floats:
    with np.errstate(over="ignore", invalid="ignore"):
        scaled = array if scale == 1 else array * np.float32(scale)
    if not np.isfinite(scaled).all():
        times = "" if scale == 1 else f", times {scale:g} for its alpha,"
        raise wrong_file(ADAPTER, f"tensor {name!r}{times} contains a number that is not finite: must be finite")
    return scaled


def _called(cfg: ModelConfig, spec: LoraSpec) -> str:
    parts = ", ".join(part for part in _SWITCHES if getattr(spec, part))
    return f"an adapter of rank {spec.rank} with {parts} on this {family_of(cfg).title} model"
