"""Training of all parameters (rank 0): what is trained is the model's own weights, in place of an adapter.

They are kept as a `Params` in float32 ("master weights", Micikevicius and others, arXiv 1710.03740), and a step
computes with them in the dtype of the base weights. Gradients and the optimizer's state are float32. All lie on the
mesh as the base weights do. The tower of a model that sees images is frozen, and no part of them.

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
import numpy.typing as npt
from jax.sharding import AbstractMesh, Mesh

from tinkerflow.backend.commands import LoraSpec, Optimizer
from tinkerflow.backend.compute import lora
from tinkerflow.backend.compute.config import ModelConfig
from tinkerflow.backend.compute.families import family_of, layers_with
from tinkerflow.backend.compute.lora import Lora
from tinkerflow.backend.compute.params import load_params, params_like
from tinkerflow.backend.compute.transformer import Params
from tinkerflow.backend.errors import UserError
from tinkerflow.backend.spec.optimizers import OPTIMIZERS

Trained: TypeAlias = Lora | Params
Tree = TypeVar("Tree")
Floats = npt.NDArray[np.float32]
_EMBED, _FINAL_NORM, _UNEMBED = "embed", "final_norm", "unembed"  # beside the names of `Params.layers`


def untrainable(cfg: ModelConfig) -> str | None:
    """What a model has that cannot be trained with all its parameters; None: nothing."""
    parts = {"experts": cfg.experts, "linear attention": cfg.delta, "heads of two widths": cfg.global_heads}
    return next((name for name, there in parts.items() if there), None)


def check(cfg: ModelConfig, optimizer: Optimizer) -> None:
    """UserError when the parameters of such a model cannot all be trained, or not with that optimizer."""
    if wrong := untrainable(cfg):
        raise UserError(
            f"lora_config.rank 0 trains all parameters, which is not supported for {family_of(cfg).title} models: they "
            f"have {wrong}. It must be 1 or more"
        )
    if OPTIMIZERS[optimizer].of_adapters:
        raise UserError(
            f"lora_config.rank 0 trains all parameters, but {optimizer} steps the matrices of adapters alone: "
            "lora_config.rank must be 1 or more, or optimizer_config.type another one"
        )


def load(cfg: ModelConfig, folder: str | Path, mesh: Mesh) -> Params:
    """The base model's weights as they are trained, from the files in `folder`; errors are as of `load_params`."""
    return replace(load_params(cfg, folder, mesh, "float32"), tower=None)


@functools.cache
def like(cfg: ModelConfig, mesh: Mesh | AbstractMesh) -> Params:
    """The weights that `load` makes, without values: shapes and shardings."""
    return replace(params_like(cfg, cast(Mesh, mesh), "float32"), tower=None)


@functools.partial(jax.jit, static_argnums=(0, 1))
def zeros(cfg: ModelConfig, mesh: Mesh) -> Params:
    """Gradients, or a part of an optimizer's state, before the first step."""
    return pinned(cfg, mesh, jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), like(cfg, mesh)))


def computed(cfg: ModelConfig, base: Params, weights: Params) -> Params:
    """The weights in the dtype that the base model computes in, with its tower."""
    wide = {name for name, tensor in family_of(cfg).tensors(cfg).items() if tensor.wide}
    kept = {name: array for name, array in by_name(weights).items() if name in wide}
    cast_down: Params = jax.tree.map(lambda array: array.astype(base.embed_VD.dtype), weights)
    return replace(cast_down, layers={**cast(Any, cast_down.layers), **kept}, tower=base.tower)


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
    return like(cfg, mesh) if spec.full else lora.shapes(cfg, spec)


def by_name(trained: Trained) -> dict[str, Any]:
    """Its arrays by our names."""
    if isinstance(trained, Lora):
        return lora.by_name(trained)
    ends = {_EMBED: trained.embed_VD, _FINAL_NORM: trained.final_norm_D, _UNEMBED: trained.unembed_VD}
    return {**cast(Any, trained.layers), **{name: array for name, array in ends.items() if array is not None}}


def from_names(arrays: Mapping[str, Any]) -> Trained:
    """The inverse of `by_name`."""
    if _EMBED not in arrays:
        return lora.from_names(arrays)
    layers = dict(arrays)
    embed, final_norm, unembed = layers.pop(_EMBED), layers.pop(_FINAL_NORM), layers.pop(_UNEMBED, None)
    return Params(embed_VD=embed, layers=layers, final_norm_D=final_norm, unembed_VD=unembed)


# ------------------------------------------------------------------ by Hugging Face's names
def to_files(cfg: ModelConfig, weights: Params) -> dict[str, Floats]:
    """Weights on the host by Hugging Face's names, contiguous: one tensor for each layer."""
    arrays = by_name(weights)
    return {file: np.array(arrays[name][place], np.float32) for file, name, place in _names(cfg)}


def from_files(cfg: ModelConfig, mesh: Mesh, read: Callable[[str, tuple[int, ...]], Floats]) -> Params:
    """The inverse of `to_files`: `read(name, shape)` gives each tensor, and raises when it has none of that shape."""
    arrays = {name: np.empty(leaf.shape, np.float32) for name, leaf in by_name(like(cfg, mesh)).items()}
    for file, name, place in _names(cfg):
        arrays[name][place] = read(file, arrays[name][place].shape)
    made = from_names(arrays)
    assert isinstance(made, Params)
    return made


def _names(cfg: ModelConfig) -> Iterator[tuple[str, str, tuple[int, ...]]]:
    """Each tensor of the files: Hugging Face's name, ours, and its place in the stack of all layers."""
    family, homes = family_of(cfg), layers_with(cfg)
    yield family.embed, _EMBED, ()
    for name, matrix in family.projections(cfg).items():
        if name != _UNEMBED or not cfg.tied:
            yield from ((f"{matrix.name(place)}.weight", name, place) for place in np.ndindex(matrix.stack))
    for name, tensor in family.tensors(cfg).items():
        yield from ((tensor.tensor.format(number), name, (place,)) for place, number in enumerate(homes[name]))
    yield family.final_norm, _FINAL_NORM, ()
