"""Model families, one file each. A new file with a `FAMILY` registers its family everywhere.

A file composes the family's layers from the parts in `layers`, according to the fields of `config.json`. The files do
not load JAX, because the API and the engine import them as well.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.family import COMPRESSED, FP8, Family
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor, Projection
from tinkerflow.backend.compute.models.tied_head import is_tied
from tinkerflow.backend.compute.weights.files import read_object
from tinkerflow.backend.compute.weights.fp8 import BLOCK

Part = TypeVar("Part", Projection, LayerTensor)
UNEMBED = "unembed"


@cache
def registered() -> Mapping[str, Family]:
    """Every family by its `model_type`: the `FAMILY` of each file in this folder."""
    names = sorted(module.name for module in pkgutil.iter_modules(__path__))
    families = [importlib.import_module(f"{__name__}.{name}").FAMILY for name in names]
    return {family.model_type: family for family in families}


def family_of(cfg: ModelConfig) -> Family:
    """The family that parsed a config."""
    return registered()[cfg.architecture]


@cache
def projections(cfg: ModelConfig) -> Mapping[str, Projection]:
    """The matrices of a model that LoRA can adapt, by our names, stacked over the layers that have them."""
    stacked = _stacked(cfg, [layer.projections() for layer in cfg.decoder_layers])
    return {**stacked, UNEMBED: Projection("lm_head", cfg.hidden, cfg.vocab, "train_unembed", kept=False)}


@cache
def layer_tensors(cfg: ModelConfig) -> Mapping[str, LayerTensor]:
    """The other tensors of a model's layers, by our names, stacked over the layers that have them."""
    return _stacked(cfg, [layer.tensors() for layer in cfg.decoder_layers])


def layer_input_tensors(cfg: ModelConfig) -> Mapping[str, tuple[str, tuple[int, ...]]]:
    """Hugging Face's names and shapes of the tensors of `LayerInput.all_layers`, by our names; {} in most models."""
    if cfg.layer_input is None:
        return {}
    model, tensors = family_of(cfg).names.model, cfg.layer_input.model_tensors(cfg.vocab, cfg.layers)
    return {name: (f"{model}{tensor}", shape) for name, (tensor, shape) in tensors.items()}


@cache
def layers_with(cfg: ModelConfig) -> Mapping[str, tuple[int, ...]]:
    """The numbers of the layers that have each matrix or other tensor, by our names, in the order of its stack."""
    every = tuple(range(cfg.layers))
    parts: dict[str, Projection | LayerTensor] = {**projections(cfg), **layer_tensors(cfg)}
    return {name: every if part.layers is None else part.layers for name, part in parts.items() if name != UNEMBED}


def _stacked(cfg: ModelConfig, layers: list[dict[str, Part]]) -> dict[str, Part]:
    prefix = family_of(cfg).names.layer
    parts: dict[str, Part] = {}
    numbers: dict[str, list[int]] = {}
    for number, own in enumerate(layers):
        for name, part in own.items():
            if parts.setdefault(name, part) != part:
                raise TypeError(f"{cfg.architecture}: {name} of layer {number} differs from that of earlier layers")
            numbers.setdefault(name, []).append(number)
    return {name: part.stacked(prefix, tuple(numbers[name]), cfg.layers) for name, part in parts.items()}


def parse_config(values: Mapping[str, Any], *, name: str) -> ModelConfig:
    """The config from a Hugging Face `config.json`. UserError: a field is wrong. name: the model's name in errors."""
    fields, families = ConfigFields(name, values), registered()
    kind = fields.get("model_type")
    if not isinstance(kind, str) or kind not in families:
        raise fields.error(f"model_type {kind!r}; supported: {', '.join(families)}")
    family = families[kind]
    _check_quantization(fields, family)
    return family.parse(fields)


def _check_quantization(fields: ConfigFields, family: Family) -> None:
    """Check the config. UserError: the quantization is not supported."""
    inner = fields.get("text_config")
    for values in (fields.values, inner if isinstance(inner, dict) else {}):
        if not values.get("quantization_config"):
            continue
        own = ConfigFields(fields.name, values).inner("quantization_config")
        method, block = own.get("quant_method"), own.get("weight_block_size")
        if method not in family.quantizations:
            raise fields.error(
                f"quantization_config.quant_method {method!r} is not supported; must be one of "
                f"{', '.join(family.quantizations)}"
            )
        if method == FP8 and block not in (None, [BLOCK, BLOCK]):
            raise fields.error(
                f"quantization_config.weight_block_size {block!r} is not supported; must be {[BLOCK, BLOCK]}"
            )
        if method == COMPRESSED:
            _check_compressed(own)


def _check_compressed(fields: ConfigFields) -> None:
    """Check the fields of compressed-tensors. UserError: weights are not in FP8 with a scale for each matrix or row."""
    groups = fields.inner("config_groups")
    for group in groups.values:
        weights = groups.inner(group).inner("weights")
        kind = weights.get("type"), weights.get("num_bits"), weights.get("strategy")
        if kind not in (("float", 8, "tensor"), ("float", 8, "channel")):
            rule = "must be float, 8 and tensor or channel"
            raise fields.error(
                f"quantization_config: type, num_bits and strategy of {group}'s weights are {kind}; {rule}"
            )
    if transformed := fields.get("transform_config"):
        raise fields.error(f"quantization_config.transform_config {transformed!r} is not supported; must be empty")


def load_config(folder: str | Path, *, name: str = "") -> ModelConfig:
    """The config of the model in `folder`. UserError: the file is missing, unreadable or not supported.

    If the config ties the embeddings, but the files have another unembedding, the result is untied, as in transformers.
    name: the model's name in errors; "" = the folder.
    """
    name, folder = name or str(folder), Path(folder)
    cfg = parse_config(read_object(folder / "config.json", name), name=name)
    return replace(cfg, tied=is_tied(family_of(cfg), cfg, folder, name))
