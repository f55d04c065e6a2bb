"""What a family of models declares: how its `config.json` is read, and Hugging Face's names of its tensors. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.weights.files import Tensor

Tensors = Mapping[str, Tensor]  # by Hugging Face's names


@dataclass(frozen=True)
class TensorNames:
    """Hugging Face's names. model: the prefix of all. layer: of those in a layer, with `{}` for its number."""

    model: str
    layer: str
    embed: str
    final_norm: str


def names_in(model: str) -> TensorNames:
    """The usual names after the prefix `model`."""
    return TensorNames(model, f"{model}layers.{{}}.", f"{model}embed_tokens.weight", f"{model}norm.weight")


TEXT_MODEL, LANGUAGE_MODEL = names_in("model."), names_in("model.language_model.")


@dataclass(frozen=True)
class Family:
    """One architecture.

    model_type: as in `config.json`.
    title: the name in the documentation.
    parse: makes the config from the fields of `config.json`; UserError for what is not computed here.
    names: of tensors; the names in a layer come from its parts.
    unpack: the tensors of a folder by the names that the config's layers have, if its files have others (fused or
    quantized). Given some of them, it returns those made from them, as views if they are arrays in memory.
    plain: the tensors of a folder without quantization, as transformers saves them.
    skipped: prefixes of the names of tensors that are not loaded.
    """

    model_type: str
    title: str
    parse: Callable[[ConfigFields], ModelConfig]
    names: TensorNames = TEXT_MODEL
    unpack: Callable[[ModelConfig, Tensors], Tensors] = lambda _, tensors: tensors
    plain: Callable[[ModelConfig, Tensors], Tensors] = lambda _, tensors: tensors
    skipped: tuple[str, ...] = ()
