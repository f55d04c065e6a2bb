"""Model families, one file each: a new file here that has a `FAMILY` is served, and every list of families shows it.

A file says how `config.json` is parsed, what the layers are made of, and what Hugging Face calls their tensors.
`transformer` computes the layers from the flags in `ModelConfig`. No JAX: the API and the engine read this, too.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from tinkerflow.backend.compute.models.config import ConfigFields, ModelConfig
from tinkerflow.backend.compute.models.decoder import LayerTensor, Projection, decoder_projections, decoder_tensors
from tinkerflow.backend.compute.weights.files import Tensor, read_object


@dataclass(frozen=True)
class Family:
    """One architecture.

    model_type: as `config.json` says it. title: as documentation says it. parse: from the fields of `config.json`; it
    raises UserError for what we do not compute. projections and tensors: what `transformer.Params` holds of each
    layer, and the unembedding, by our names. unpack: the tensors of a folder by the names that these have, if its files
    have others (fused or quantised); given a part of them, those that are made of it, as views if it is an array in
    memory. plain: the tensors of a folder without quantisation, as transformers saves them. embed and final_norm:
    Hugging Face's names of these two tensors. skipped: what the names of tensors begin with that are not loaded.
    inputs: Hugging Face's names and the shapes of the tensors that `transformer.layer_inputs` takes, by its names.
    """

    model_type: str
    title: str
    parse: Callable[[ConfigFields], ModelConfig]
    projections: Callable[[ModelConfig], dict[str, Projection]] = decoder_projections
    tensors: Callable[[ModelConfig], dict[str, LayerTensor]] = decoder_tensors
    unpack: Callable[[ModelConfig, Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda _, tensors: tensors
    plain: Callable[[ModelConfig, Mapping[str, Tensor]], Mapping[str, Tensor]] = lambda _, tensors: tensors
    embed: str = "model.embed_tokens.weight"
    final_norm: str = "model.norm.weight"
    skipped: tuple[str, ...] = ()
    inputs: Callable[[ModelConfig], dict[str, tuple[str, tuple[int, ...]]]] = lambda _: {}


@cache
def registered() -> Mapping[str, Family]:
    """Every family by its `model_type`: the `FAMILY` of each file in this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    families = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in names]
    return {family.model_type: family for family in families}


def family_of(cfg: ModelConfig) -> Family:
    """The family that a config was parsed by."""
    return registered()[cfg.architecture]


def projections(cfg: ModelConfig) -> dict[str, Projection]:
    """The matrices of a model that LoRA can adapt, by our names."""
    return family_of(cfg).projections(cfg)


@cache
def layers_with(cfg: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The numbers of the layers that have each matrix and each other tensor, by our names, as it is stacked."""
    family, every = family_of(cfg), tuple(range(cfg.layers))
    parts: dict[str, Projection | LayerTensor] = {**family.projections(cfg), **family.tensors(cfg)}
    return {name: every if part.layers is None else part.layers for name, part in parts.items() if name != "unembed"}


def parse_config(values: Mapping[str, Any], *, name: str) -> ModelConfig:
    """A config from the fields of a Hugging Face `config.json`; UserError, if not, calls the model `name`."""
    fields, families = ConfigFields(name, values), registered()
    kind = fields.get("model_type")
    if kind not in families:
        raise fields.error(f"model_type {kind!r}; supported: {', '.join(families)}")
    return families[kind].parse(fields)


def load_config(folder: str | Path, *, name: str = "") -> ModelConfig:
    """The config of the model in `folder`; UserError when it is missing, unreadable or of a kind we do not run.

    name: as errors call the model; the folder when it is empty.
    """
    name = name or str(folder)
    return parse_config(read_object(Path(folder) / "config.json", name), name=name)
