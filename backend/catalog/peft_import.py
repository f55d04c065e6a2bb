"""Imports PEFT adapters: checks them against the base model, and converts them to checkpoints for further training.

PEFT scales the update of a module by lora_alpha / r, or by lora_alpha / sqrt(r) with rsLoRA (arXiv 2312.03732). Our
adapters share one alpha and one rank, so B is multiplied by the quotient of the two scales. A power of two causes no
rounding.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import ml_dtypes
import numpy as np

from tinkerflow.backend.catalog.fused_pairs import with_separate_pairs
from tinkerflow.backend.catalog.peft_config import Scales, Targets, read_fields, wrong_file
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import family_of, projections
from tinkerflow.backend.compute.models.family import LANGUAGE_MODEL, TEXT_MODEL, open_unpacked
from tinkerflow.backend.compute.models.layers.matrices import Projection
from tinkerflow.backend.compute.models.peft_names import PEFT, matrix_rank, modules, pair_names
from tinkerflow.backend.compute.weights.files import DTYPES
from tinkerflow.backend.core.errors import StoreError
from tinkerflow.backend.core.ids import IMPORTED, CheckpointKind, model_id
from tinkerflow.backend.spec.commands import LORA_ALPHA, AdapterState, LoraSpec
from tinkerflow.backend.spec.ranks import peft_factor
from tinkerflow.backend.store import CheckpointMeta, CheckpointPath, Saved, Store
from tinkerflow.backend.store.peft import ADAPTER, ADAPTER_CONFIG, Floats, decode_any

_HEADER_BYTES = 512  # of a tensor: its name, dtype, shape and place
_COPY = ".base_layer.weight"  # PEFT adds a copy of the base model's unembedding to files with its adapter
_COPIED = (np.float32, ml_dtypes.bfloat16, np.float16)  # dtypes in which the copy may have been rounded
_ROWS = 4096  # compared at a time
_B = ".lora_B.weight"
_SWITCHES = ("train_attn", "train_mlp", "train_unembed")  # of a LoraSpec


def import_adapter(
    cfg: ModelConfig, config: bytes, adapter: bytes, asked: LoraSpec | None = None, folder: str | Path | None = None
) -> AdapterState:
    """Convert an adapter in PEFT's files to a state to save. The optimizer starts fresh.

    The rank is r, or the largest rank of a module if that is larger. Modules of a smaller rank, and those that the
    config leaves out, are filled with zeros. Both A and B are zero there, so training does not change them.

    cfg: the base model. config, adapter: the bytes of adapter_config.json and adapter_model.safetensors, of float32,
    float16 or bfloat16. asked: the requested rank and targets; None: those of the files. If the base model also takes
    images, the modules may have their names in the text model alone. folder: the base model's folder, to compare its
    unembedding with a copy in the files; None = do not compare. UserError: the service does not support a field or
    tensor; the error names it, its value and the rule.
    """
    values = read_fields(config)
    try:
        files = decode_any(adapter)
    except StoreError as error:
        raise wrong_file(ADAPTER, f"it is {error}") from error
    tensors, parameters = with_separate_pairs(cfg, files, values.get("target_parameters") or [])
    prefixes = family_of(cfg).names.model, _prefix(cfg, tensors)
    scales, targets = Scales(values, parameters), Targets(values, projections(cfg)["unembed"].module)
    all_ = {_stored(module, prefixes): projection for module, projection in modules(cfg, LoraSpec(values["r"])).items()}
    present = {stored: each for stored, each in all_.items() if not tensors.keys().isdisjoint(pair_names(stored))}
    spec = _spec(values["r"], scales, present, asked, next(iter(all_)))
    parts = {projection.switch for projection in present.values()}
    weights: dict[str, Floats] = {}
    adapted = {_stored(module, prefixes): (module, each) for module, each in modules(cfg, spec).items()}
    for stored, (module, projection) in adapted.items():
        own = matrix_rank(spec, projection)
        pair = np.zeros((own, projection.inputs), np.float32), np.zeros((projection.outputs, own), np.float32)
        if stored in present or projection.switch not in parts or targets.include(stored):
            A, B = _read(tensors, stored, projection, scales.rank(stored), _called(cfg, spec))
            factor = scales.alpha(stored, own) / LORA_ALPHA * peft_factor(spec.rank, own)
            pair[0][: len(A)] = _scaled(A, 1.0, pair_names(stored)[0])
            pair[1][:, : len(A)] = _scaled(B, factor, pair_names(stored)[1])
        weights |= zip(pair_names(module), pair, strict=True)
    targets.check([stored for stored in adapted if stored in present and stored not in parameters])
    known = {name for stored in adapted for name in (*pair_names(stored), f"{PEFT}{stored}{_COPY}")}
    if surplus := sorted(set(tensors) - known - _without_effect(tensors, all_)):
        raise wrong_file(ADAPTER, f"tensor {surplus[0]!r} is not part of {_called(cfg, spec)}: must be absent")
    if folder and any(Path(folder).glob("*.safetensors")):  # a host of the API may have only the other files
        for name in {f"{PEFT}{stored}{_COPY}" for stored in adapted} & tensors.keys():
            _check_copy(cfg, Path(folder), name, tensors[name])
    return AdapterState(spec, 0, weights)


def largest_size(cfg: ModelConfig, spec: LoraSpec) -> int:
    """The largest possible size of adapter_model.safetensors in bytes: in float32, with experts of full rank.

    Files with an adapter of the unembedding also contain a copy of the base model's unembedding.
    """
    each = [(projection, spec.rank) for projection in modules(cfg, replace(spec, expert_rank=None)).values()]
    numbers = sum(rank * (projection.inputs + projection.outputs) for projection, rank in each)
    copy = cfg.vocab * cfg.hidden if spec.train_unembed else 0
    return 4 * (numbers + copy) + _HEADER_BYTES * (2 * len(each) + 8)


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

    session_id: the import's session. state: from `import_adapter`. base_model: the name for clients. owner: the
    project. name: the checkpoint's name. request_id: "" = the session is imported once. ConflictError: another request
    has used the name.
    """
    meta = CheckpointMeta(base_model=base_model, owner=owner, request_id=request_id or session_id)
    path = import_path(session_id, name)
    return store.save(path.run_id, path.kind, path.name, state, meta)


def import_path(session_id: str, name: str = IMPORTED) -> CheckpointPath:
    return CheckpointPath(model_id(session_id, 0), CheckpointKind.WEIGHTS, name)


def _without_effect(tensors: Mapping[str, Floats], modules: Collection[str]) -> set[str]:
    """The names of A and B of modules outside `modules` that have a zero B.

    If PEFT adapts a model that takes images and trains it on text, the adapter of its vision tower stays zero.
    """
    others = {name.removesuffix(_B) for name in tensors if name.endswith(_B)} - {f"{PEFT}{each}" for each in modules}
    pairs = [pair_names(name.removeprefix(PEFT)) for name in others if name.startswith(PEFT)]
    return {name for A, B in pairs if A in tensors and not tensors[B].any() for name in (A, B)}


def _check_copy(cfg: ModelConfig, folder: Path, name: str, copy: Floats) -> None:
    """Raise UserError if a copy of the unembedding differs from the base model's, which the service uses."""
    family = family_of(cfg)
    unembed = f"{projections(cfg)['unembed'].module}.weight"
    own = open_unpacked(family, cfg, folder, str(folder))[family.names.embed if cfg.tied else unembed]
    numbers = own.view(DTYPES[own.dtype])

    def is_copied(rows: slice) -> bool:
        each = (numbers[rows].astype(dtype).astype(np.float32) for dtype in _COPIED)
        return any(np.array_equal(copy[rows], rounded) for rounded in each)

    if copy.shape != own.shape or not all(is_copied(slice(row, row + _ROWS)) for row in range(0, len(copy), _ROWS)):
        raise wrong_file(ADAPTER, f"tensor {name!r} differs from the base model's unembedding: must be a copy of it")


def _prefix(cfg: ModelConfig, tensors: Collection[str]) -> str:
    """The prefix of the names of the text model's modules in the files.

    AutoModelForCausalLM loads Qwen3.5 without the parts for images, so its names differ from those in its files.
    """
    own = family_of(cfg).names.model
    alone = own == LANGUAGE_MODEL.model and any(name.startswith(f"{PEFT}{TEXT_MODEL.model}layers.") for name in tensors)
    return TEXT_MODEL.model if alone else own


def _stored(module: str, prefixes: tuple[str, str]) -> str:
    """The name of a module in the files. prefixes: of the text model's modules: ours, and the files'."""
    ours, there = prefixes
    return there + module.removeprefix(ours) if module.startswith(ours) else module


def _spec(r: int, scales: Scales, present: Mapping[str, Projection], asked: LoraSpec | None, example: str) -> LoraSpec:
    """The adapter's shape: as requested, or else as in the files. The rank of experts comes from the files.

    r: the config's r. scales: its ranks. present: the modules with tensors in the files. example: a module of the base
    model.
    """
    ranks = {stored: scales.rank(stored) for stored in present}
    rank = max([r, *ranks.values()])
    if asked is None:
        if not present:
            names = pair_names(example)
            raise wrong_file(ADAPTER, f"no tensor belongs to a matrix of this base model, such as {names[0]!r}")
        switches = {projection.switch for projection in present.values()}
        asked = LoraSpec(rank, **{switch: switch in switches for switch in _SWITCHES})
    elif asked.rank != rank:
        field = "r" if rank == r else "the largest rank in rank_pattern"
        raise wrong_file(ADAPTER_CONFIG, f"{field} is {rank}: must be {asked.rank}, lora_config.rank")
    own = max((ranks[stored] for stored, projection in present.items() if projection.of_experts), default=rank)
    return replace(asked, expert_rank=None if own == rank else own)


def _read(
    tensors: Mapping[str, Floats], module: str, projection: Projection, rank: int, called: str
) -> tuple[Floats, Floats]:
    """A and B of a module in the files. rank: in the config. called: the adapter, for errors."""
    names, (inputs, outputs) = pair_names(module), (projection.inputs, projection.outputs)
    found = [tensors.get(name) for name in names]
    A, B = found
    if A is not None and B is not None and A.ndim == B.ndim == 2 and len(A) == B.shape[1] != rank:
        rule = f"must be {len(A)}, as in {ADAPTER}"
        raise wrong_file(ADAPTER_CONFIG, f"the rank of {module!r} is {rank}: {rule}")
    for name, array, shape in zip(names, found, ((rank, inputs), (outputs, rank)), strict=True):
        if array is None or array.shape != shape:
            wrong = "is missing" if array is None else f"has shape {array.shape}"
            raise wrong_file(ADAPTER, f"tensor {name!r} {wrong}: must exist with shape {shape}, for {called}")
    assert A is not None and B is not None
    return A, B


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
