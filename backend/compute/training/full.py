"""Training of all parameters (rank 0): what is trained is the model's own weights, in place of an adapter.

They are kept as a `Params` in float32 ("master weights", Micikevicius and others, arXiv 1710.03740), and a step
computes with them in the dtype of the base weights. Gradients and the optimizer's state are float32. All lie on the
mesh as the base weights do. The tower of a model that sees images is frozen, and so are tensors that transformers
has as buffers (`LayerTensor.frozen`): they are no part of what is trained, and a step takes those of the base model.

Adapters and whole models go the same ways: the functions here that take `Trained` are given either.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeAlias, TypeVar, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh

from tinkerflow.backend.compute.models import lora, lora_weights
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.families import (
    family_of,
    layer_input_tensors,
    layer_tensors,
    layers_with,
    projections,
)
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.params import load_params, params_like
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.core.errors import UserError
from tinkerflow.backend.spec.commands import Float32, LoraSpec, Optimizer
from tinkerflow.backend.spec.optimizers import OPTIMIZERS

Trained: TypeAlias = Lora | Params
Tree = TypeVar("Tree")
_EMBED, _FINAL_NORM, _UNEMBED = "embed", "final_norm", "unembed"  # beside the names of `Params.layers`
_INPUTS = "inputs."  # what those of `Params.inputs` begin with


def check(optimizer: Optimizer) -> None:
    """UserError when all parameters cannot be trained with that optimizer."""
    if OPTIMIZERS[optimizer].of_adapters:
        raise UserError(
            f"lora_config.rank 0 trains all parameters, but {optimizer} steps the matrices of adapters alone: "
            "lora_config.rank must be 1 or more, or optimizer_config.type another one"
        )


def load(cfg: ModelConfig, folder: str | Path, mesh: Mesh) -> Params:
    """The base model's weights as they are trained, from the files in `folder`; errors are as of `load_params`."""
    return _without_frozen(cfg, load_params(cfg, folder, mesh, "float32"))


@functools.cache
def like(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> Params:
    """The weights that `load` makes, without values: shapes and shardings."""
    return _without_frozen(cfg, params_like(cfg, cast(Mesh, mesh), "float32"))


@functools.partial(jax.jit, static_argnums=(0, 1))
def zeros(cfg: ModelConfig, mesh: Mesh) -> Params:
    """Gradients, or a part of an optimizer's state, before the first step."""
    return pinned(cfg, mesh, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like(cfg, mesh)))


def computed(cfg: ModelConfig, base: Params, weights: Params) -> Params:
    """The weights in the dtype that the base model computes in, with what is frozen of it."""
    return with_frozen(base, narrowed(cfg, base.embed_VD.dtype, weights))


def narrowed(cfg: ModelConfig, dtype: Any, weights: Params) -> Params:
    """The weights in that dtype, but for tensors that are always kept in float32."""
    wide = {name for name, tensor in layer_tensors(cfg).items() if tensor.wide}
    kept = {name: array for name, array in by_name(weights).items() if name in wide}
    cast_down: Params = jax.tree.map(lambda array: array.astype(dtype), weights)
    return replace(cast_down, layers={**cast(Any, cast_down.layers), **kept})


def with_frozen(base: Params, weights: Params) -> Params:
    """Trained weights with what the base model, whose layers are stacked, has beside them."""
    return replace(weights, layers={**cast(Any, base.layers), **cast(Any, weights.layers)}, tower=base.tower)


def _without_frozen(cfg: ModelConfig, params: Params) -> Params:
    frozen = {name for name, tensor in layer_tensors(cfg).items() if tensor.frozen}
    layers = {name: array for name, array in cast(Any, params.layers).items() if name not in frozen}
    return replace(params, layers=layers, tower=None)


def with_head_gradient(grads: Params, by_head_VD: jax.Array) -> Params:
    """The gradients, with what the unembedding has beside them: of a tied one that is the embedding's."""
    if grads.unembed_VD is None:
        return replace(grads, embed_VD=grads.embed_VD + by_head_VD)
    return replace(grads, unembed_VD=by_head_VD)


# ------------------------------------------------------------------ of adapters, too
def shardings(cfg: ModelConfig, mesh: Mesh, tree: Tree) -> Tree:
    """Where each array of what is trained lies, and of anything that holds such parts (an optimizer's state)."""

    def where(node: Any) -> Any:
        if isinstance(node, Params):
            return jax.tree.map(lambda leaf: leaf.sharding, like(cfg, mesh))
        return lora.shardings(mesh, node)

    found: Tree = jax.tree.map(where, tree, is_leaf=lambda node: isinstance(node, Params))
    return found


def pinned(cfg: ModelConfig, mesh: Mesh, tree: Tree) -> Tree:
    """Inside a jitted function: the same, as `shardings` places it."""
    placed: Tree = jax.lax.with_sharding_constraint(tree, shardings(cfg, mesh, tree))
    return placed


def shapes(cfg: ModelConfig, mesh: Mesh, spec: LoraSpec) -> Trained:
    """What a model of that shape trains, without values."""
    return like(cfg, mesh) if spec.full else lora_weights.shapes(cfg, spec)


def by_name(trained: Trained) -> dict[str, Any]:
    """Its arrays by our names."""
    if isinstance(trained, Lora):
        return lora.by_name(trained)
    ends = {_EMBED: trained.embed_VD, _FINAL_NORM: trained.final_norm_D, _UNEMBED: trained.unembed_VD}
    ends |= {f"{_INPUTS}{name}": array for name, array in (trained.inputs or {}).items()}
    return {**cast(Any, trained.layers), **{name: array for name, array in ends.items() if array is not None}}


def from_names(cfg: ModelConfig, arrays: Mapping[str, Any]) -> Trained:
    """The inverse of `by_name`."""
    if _EMBED not in arrays:
        return lora.from_names(arrays)
    layers = dict(arrays)
    inputs = {name: layers.pop(f"{_INPUTS}{name}") for name in layer_input_tensors(cfg)}
    return Params(
        embed_VD=layers.pop(_EMBED),
        final_norm_D=layers.pop(_FINAL_NORM),
        unembed_VD=layers.pop(_UNEMBED, None),
        inputs=inputs or None,
        softcap=cfg.softcap,
        layers=layers,
    )


# ------------------------------------------------------------------ by Hugging Face's names
def to_files(cfg: ModelConfig, weights: Params) -> dict[str, Float32]:
    """Weights on the host by Hugging Face's names, contiguous: one tensor for each layer."""
    arrays = by_name(weights)
    return {file: np.array(_lying(arrays[name][place], turned), np.float32, order="C")
            for file, name, place, turned in _names(cfg)}  # fmt: skip


def from_files(cfg: ModelConfig, mesh: Mesh, read: Callable[[str, tuple[int, ...]], Float32]) -> Params:
    """The inverse of `to_files`: `read(name, shape)` gives each tensor, and raises when it has none of that shape."""
    arrays = {name: np.empty(leaf.shape, np.float32) for name, leaf in by_name(like(cfg, mesh)).items()}
    for file, name, place, turned in _names(cfg):
        part = _lying(arrays[name][place], turned)
        part[...] = read(file, part.shape)
    made = from_names(cfg, arrays)
    assert isinstance(made, Params)
    return made


def _lying(array: Float32, turned: bool) -> Float32:
    return array.T if turned else array


def _names(cfg: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...], bool]]:
    """Each tensor of the files: Hugging Face's name, ours, its place in the stack, and whether it is transposed there.

    The stack is that of all layers. Experts' matrices lie as `params` says.
    """
    names, homes = family_of(cfg).names, layers_with(cfg)
    yield names.embed, _EMBED, (), False
    for name, matrix in projections(cfg).items():
        if name != _UNEMBED or not cfg.tied:
            for place in np.ndindex(matrix.stack):
                yield f"{matrix.name(place)}.weight", name, place, matrix.of_experts
    for name, tensor in layer_tensors(cfg).items():
        for row, number in enumerate(() if tensor.frozen else homes[name]):
            yield tensor.tensor.format(number), name, (row,), False
    yield from ((file, f"{_INPUTS}{name}", (), False) for name, (file, _) in layer_input_tensors(cfg).items())
    yield names.final_norm, _FINAL_NORM, (), False
