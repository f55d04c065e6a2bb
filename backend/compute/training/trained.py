"""The arrays that a model trains: an adapter, or all parameters. Functions for both: shapes, shardings and names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias, TypeVar

import jax
from jax.sharding import Mesh

from tinkerflow.backend.compute.models import lora, lora_weights
from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.lora import Lora
from tinkerflow.backend.compute.models.transformer import Params
from tinkerflow.backend.compute.training.full_parameters import (
    EMBED,
    weights_by_name,
    weights_from_names,
    weights_like,
)
from tinkerflow.backend.spec.commands import LoraSpec

Trained: TypeAlias = Lora | Params
Tree = TypeVar("Tree")


def trained_shapes(cfg: ModelConfig, mesh: Mesh, spec: LoraSpec) -> Trained:
    """The arrays that a model of this shape trains, without values."""
    return weights_like(cfg, mesh) if spec.full else lora_weights.shapes(cfg, spec)


def trained_shardings(cfg: ModelConfig, mesh: Mesh, tree: Tree) -> Tree:
    """The sharding of each array in a tree of trained arrays, such as an optimizer's state."""

    def of_node(node: Any) -> Any:
        if isinstance(node, Params):
            return jax.tree.map(lambda leaf: leaf.sharding, weights_like(cfg, mesh))
        return lora.shardings(mesh, node)

    shardings: Tree = jax.tree.map(of_node, tree, is_leaf=lambda node: isinstance(node, Params))
    return shardings


def constrain_trained(cfg: ModelConfig, mesh: Mesh, tree: Tree) -> Tree:
    """The tree with the shardings of `trained_shardings`, inside a jitted function."""
    constrained: Tree = jax.lax.with_sharding_constraint(tree, trained_shardings(cfg, mesh, tree))
    return constrained


def arrays_by_name(trained: Trained) -> dict[str, Any]:
    """The arrays by our names."""
    return lora.by_name(trained) if isinstance(trained, Lora) else weights_by_name(trained)


def trained_from_names(cfg: ModelConfig, arrays: Mapping[str, Any]) -> Trained:
    """The inverse of `arrays_by_name`."""
    return weights_from_names(cfg, arrays) if EMBED in arrays else lora.from_names(arrays)
