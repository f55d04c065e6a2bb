"""The declaration of a model family: how its `config.json` is read, and Hugging Face's names of its tensors. No JAX."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.weights.files import Tensor, open_tensors
from tinkerflow.backend.core.errors import UserError

Tensors = Mapping[str, Tensor]  # by Hugging Face's names
FP8, COMPRESSED, MXFP4 = "fp8", "compressed-tensors", "mxfp4"  # of `quantization_config.quant_method`


@dataclass(frozen=True)
class TensorNames:
    """Hugging Face's names. model: the prefix of all names. layer: the prefix in a layer, with `{}` for its number."""

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
    parse: makes the config from the fields of `config.json`; raises UserError for unsupported values.
    names: the prefixes of tensors' names; the layer's parts declare the names in a layer.
    unpack: converts a folder's tensors to those of the config's layers, if the files have fused or quantized tensors.
    Given only some tensors, it returns the tensors made from them, as views if they are arrays in memory.
    plain: converts a folder's tensors to tensors without quantization, as transformers saves them.
    skipped: prefixes of the names of tensors that are not loaded.
    quantizations: the supported values of `quantization_config.quant_method`.
    interleaved: transformers' fused experts alternate the outputs of gate and up, instead of all of gate before up.
    """

    model_type: str
    title: str
    parse: Callable[[ConfigFields], ModelConfig]
    names: TensorNames = TEXT_MODEL
    unpack: Callable[[ModelConfig, Tensors], Tensors] = lambda _, tensors: tensors
    plain: Callable[[ModelConfig, Tensors], Tensors] = lambda _, tensors: tensors
    skipped: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = (FP8, COMPRESSED)
    interleaved: bool = False


def open_unpacked(family: Family, cfg: ModelConfig, folder: Path, name: str) -> Tensors:
    """The tensors of the model in `folder`, unpacked. name: the model's name in errors."""
    tensors = open_tensors(folder, name)
    try:
        return family.unpack(cfg, tensors)
    except UserError as error:
        raise UserError(f"base model {name!r}: {error.message}") from error


def renamed(tensors: Tensors, rename: Callable[[str], str]) -> Tensors:
    """The tensors under other names. UserError: two tensors get the same name."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if found.setdefault(rename(name), tensor) is not tensor:
            raise UserError(f"tensor {name!r} is in the files twice, also under another name")
    return found


def with_parts(tensors: Tensors, fused: Collection[str], parts: Tensors) -> Tensors:
    """The tensors with `parts` instead of `fused`. UserError: the files contain a part as well."""
    rest = {name: tensor for name, tensor in tensors.items() if name not in fused}
    if both := sorted(rest.keys() & parts.keys()):
        raise UserError(f"tensor {both[0]!r} is in the files twice: alone, and as a part of {min(fused)!r}")
    return {**rest, **parts}


def check_shape(name: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    """Check a tensor of the files. UserError: the tensor has none of these shapes."""
    if tensor.shape not in shapes:
        raise UserError(f"tensor {name!r} has shape {tensor.shape}; config.json asks for shape {shapes[0]}")
