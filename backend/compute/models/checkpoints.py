"""Checks the tensors of a model's files against its config. No JAX."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import family_of, layer_input_tensors, layer_tensors, projections
from tinkerflow.backend.compute.models.tied_head import HEAD
from tinkerflow.backend.compute.models.vision_config import tower_tensors
from tinkerflow.backend.compute.weights.files import DTYPES, Tensor
from tinkerflow.backend.core.errors import UserError

_UNUSED = (".rotary_emb.inv_freq", ".masked_bias")  # buffers that old releases of transformers saved


def expected_tensors(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """The shape of every tensor that is loaded, by Hugging Face's name."""
    names = family_of(cfg).names
    shapes: dict[str, tuple[int, ...]] = {names.embed: (cfg.vocab, cfg.hidden), names.final_norm: (cfg.hidden,)}
    for matrix in projections(cfg).values():
        for place in np.ndindex(matrix.stack):
            shapes[f"{matrix.name(place)}.weight"] = (matrix.outputs, matrix.inputs)
    if cfg.tied:
        del shapes[HEAD]
    tower = {} if cfg.vision is None else tower_tensors(cfg.vision, cfg.hidden)
    for tensor in (*layer_tensors(cfg).values(), *tower.values()):
        for number in range(cfg.layers) if tensor.layers is None else tensor.layers:
            shapes[tensor.tensor.format(number)] = tensor.shape
    return shapes | dict(layer_input_tensors(cfg).values())


def check_tensors(cfg: ModelConfig, tensors: Mapping[str, Tensor], name: str) -> None:
    """Check the tensors. UserError: a tensor is missing, not part of the model, or has the wrong shape or dtype.

    An unused tensor is an error, because the files then contain a different model than the config describes.

    cfg: from `load_config`. tensors: unpacked. name: the model's name.
    """
    expected = expected_tensors(cfg)
    for key, shape in expected.items():
        tensor = tensors.get(key)
        if tensor is None or tensor.shape != shape:
            wrong = "is missing" if tensor is None else f"has shape {tensor.shape}"
            raise UserError(f"base model {name!r}: tensor {key!r} {wrong}; config.json asks for shape {shape}")
        if tensor.dtype not in DTYPES:
            raise UserError(f"base model {name!r}: tensor {key!r} is {tensor.dtype}; supported: {', '.join(DTYPES)}")
    family = family_of(cfg)
    copies = {HEAD} if cfg.tied else set()  # some files have the shared matrix twice
    skipped = {key for key in tensors if key.startswith(family.skipped) or key.endswith(_UNUSED)}
    if surplus := sorted(tensors.keys() - expected.keys() - copies - skipped):
        more = f" ({len(surplus) - 1} others are not, either)" if surplus[1:] else ""
        raise UserError(f"base model {name!r}: tensor {surplus[0]!r} is not part of this {family.title} model{more}")
