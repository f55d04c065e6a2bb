"""Training of all parameters (rank 0): the model's own weights are trained, without an adapter.

The weights are a `Params` in float32 ("master weights", Micikevicius and others, arXiv 1710.03740). A step computes in
the dtype of the base weights. Gradients and the optimizer's state are float32. All these arrays have the shardings of
the base weights. The vision tower is frozen, and so are tensors that are buffers in transformers
(`LayerTensor.frozen`). A step takes frozen tensors from the base model.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import (
    family_of,
    layer_input_tensors,
    layer_tensors,
    layers_with,
    projections,
)
from tinkerflow.backend.compute.models.params import load_params, params_like
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Float32, Optimizer
from tinkerflow.backend.spec.optimizers import OPTIMIZERS

# Names of arrays outside `Params.layers`. Names in `Params.inputs` have a prefix.
EMBED, _FINAL_NORM, _UNEMBED, _INPUTS = "embed", "final_norm", "unembed", "inputs."


def check_optimizer(optimizer: Optimizer) -> None:
    """Raise UserError if the optimizer cannot train all parameters."""
    if OPTIMIZERS[optimizer].of_adapters:
        raise UserError(
            f"lora_config.rank 0 trains all parameters, but {optimizer} steps the matrices of adapters alone: "
            "lora_config.rank must be 1 or more, or optimizer_config.type must be another optimizer"
        )


def load_weights(cfg: ModelConfig, folder: str | Path, mesh: Mesh) -> Params:
    """The base model's weights in float32, from the files in `folder`. Errors are those of `load_params`."""
    return _without_frozen(cfg, load_params(cfg, folder, mesh, "float32"))


@functools.cache
def weights_like(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> Params:
    """The shapes and shardings of the weights that `load_weights` returns."""
    return _without_frozen(cfg, params_like(cfg, cast(Mesh, mesh), "float32"))


@functools.partial(jax.jit, static_argnums=(0, 1))
def zero_gradients(cfg: ModelConfig, mesh: Mesh) -> Params:
    """Gradients, or a part of an optimizer's state, before the first step."""
    like = weights_like(cfg, mesh)
    zeros: Params = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like)
    return jax.lax.with_sharding_constraint(zeros, jax.tree.map(lambda leaf: leaf.sharding, like))


def in_compute_dtype(cfg: ModelConfig, base: Params, weights: Params) -> Params:
    """The weights in the dtype of the base model, with the frozen parts of the base model."""
    return with_frozen(base, cast_weights(cfg, base.embed_VD.dtype, weights))


def cast_weights(cfg: ModelConfig, dtype: Any, weights: Params) -> Params:
    """The weights in `dtype`, except for tensors that are always float32."""
    wide = {name for name, tensor in layer_tensors(cfg).items() if tensor.wide}
    kept = {name: array for name, array in weights_by_name(weights).items() if name in wide}
    cast_down: Params = jax.tree.map(lambda array: array.astype(dtype), weights)
    return replace(cast_down, layers={**cast(Any, cast_down.layers), **kept})


def with_frozen(base: Params, weights: Params) -> Params:
    """Trained weights with the frozen parts of the base model, whose layers are stacked."""
    return replace(weights, layers={**cast(Any, base.layers), **cast(Any, weights.layers)}, tower=base.tower)


def _without_frozen(cfg: ModelConfig, params: Params) -> Params:
    frozen = {name for name, tensor in layer_tensors(cfg).items() if tensor.frozen}
    layers = {name: array for name, array in cast(Any, params.layers).items() if name not in frozen}
    return replace(params, layers=layers, tower=None)


def add_head_gradient(grads: Params, by_head_VD: jax.Array) -> Params:
    """The gradients with the unembedding's gradient added. A tied unembedding is the embedding."""
    if grads.unembed_VD is None:
        return replace(grads, embed_VD=grads.embed_VD + by_head_VD)
    return replace(grads, unembed_VD=by_head_VD)


def weights_by_name(weights: Params) -> dict[str, Any]:
    """The arrays by our names."""
    ends = {EMBED: weights.embed_VD, _FINAL_NORM: weights.final_norm_D, _UNEMBED: weights.unembed_VD}
    ends |= {f"{_INPUTS}{name}": array for name, array in (weights.inputs or {}).items()}
    return {**cast(Any, weights.layers), **{name: array for name, array in ends.items() if array is not None}}


def weights_from_names(cfg: ModelConfig, arrays: Mapping[str, Any]) -> Params:
    """The inverse of `weights_by_name`."""
    layers = dict(arrays)
    inputs = {name: layers.pop(f"{_INPUTS}{name}") for name in layer_input_tensors(cfg)}
    return Params(
        embed_VD=layers.pop(EMBED),
        final_norm_D=layers.pop(_FINAL_NORM),
        unembed_VD=layers.pop(_UNEMBED, None),
        inputs=inputs or None,
        softcap=cfg.softcap,
        layers=layers,
    )


# ------------------------------------------------------------------ by Hugging Face's names
def to_files(cfg: ModelConfig, weights: Params) -> dict[str, Float32]:
    """Contiguous weights on the host by Hugging Face's names, with a tensor for each layer."""
    arrays = weights_by_name(weights)
    return {file: np.array(_transposed(arrays[name][place], transposed), np.float32, order="C")
            for file, name, place, transposed in _names(cfg)}  # fmt: skip


def from_files(cfg: ModelConfig, mesh: Mesh, read: Callable[[str, tuple[int, ...]], Float32]) -> Params:
    """The inverse of `to_files`. read(name, shape) returns a tensor, and raises if there is none of that shape."""
    arrays = {name: np.empty(leaf.shape, np.float32) for name, leaf in weights_by_name(weights_like(cfg, mesh)).items()}
    for file, name, place, transposed in _names(cfg):
        part = _transposed(arrays[name][place], transposed)
        part[...] = read(file, part.shape)
    return weights_from_names(cfg, arrays)


def _transposed(array: Float32, transposed: bool) -> Float32:
    return array.T if transposed else array


def _names(cfg: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
    """Each tensor of the files: Hugging Face's name, our name, the index in the stack of all layers, and whether the
    tensor is transposed in the stack, as experts' matrices are (`params`).
    """
    names, homes = family_of(cfg).names, layers_with(cfg)
    yield names.embed, EMBED, (), False
    for name, matrix in projections(cfg).items():
        if name != _UNEMBED or not cfg.tied:
            for place in np.ndindex(matrix.stack):
                yield f"{matrix.name(place)}.weight", name, place, matrix.of_experts
    for name, tensor in layer_tensors(cfg).items():
        for row, number in enumerate(() if tensor.frozen else homes[name]):
            yield tensor.tensor.format(number), name, (row,), False
    yield from ((file, f"{_INPUTS}{name}", (), False) for name, (file, _) in layer_input_tensors(cfg).items())
    yield names.final_norm, _FINAL_NORM, (), False
