"""Composes decoders for the families, from fields of `config.json` that several families share. No JAX."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import DecoderLayer, RMSNorm
from tinkerflow.backend.compute.models.rope import FULL, LINEAR, SLIDING


def layer_count(fields: ConfigFields) -> int:
    """How many layers `config.json` describes."""
    return fields.size("num_hidden_layers")


def decoder(
    fields: ConfigFields, norm: RMSNorm, layers: Sequence[DecoderLayer], *, tied: bool = False, **more: Any
) -> ModelConfig:
    """The decoder with these layers. The field `model_type` is its architecture.

    fields: from `config.json`. norm: normalizes the last layer's result. tied: whether the embedding is the
    unembedding, if the file does not set it. more: other fields of ModelConfig. UserError: a field is missing or wrong.
    """
    _check_types(fields, layers)
    fields.refuse_others(per_layer_config={})
    return ModelConfig(
        architecture=fields["model_type"],
        vocab=fields.size("vocab_size"),
        hidden=fields.size("hidden_size"),
        decoder_layers=tuple(layers),
        norm=norm,
        max_positions=fields.size("max_position_embeddings"),
        tied=fields.flag("tie_word_embeddings", tied),
        **more,
    )


def _check_types(fields: ConfigFields, layers: Sequence[DecoderLayer]) -> None:
    """Check the file. UserError: the file's `layer_types` differ from the types of `layers`."""
    types = fields.get("layer_types")
    computed = [LINEAR if not layer.attends else SLIDING if layer.window else FULL for layer in layers]
    if types is not None and types != computed:
        raise fields.error(f"layer_types {types!r} is not supported; must be {computed}")


def windows(fields: ConfigFields, usual: Sequence[str]) -> list[int | None]:
    """The window of every layer; None = the layer sees all earlier tokens.

    usual: FULL or SLIDING for each layer, if the file has no `layer_types`. UserError: a type is not supported, or the
    number of types is wrong.
    """
    types = fields.types("layer_types", usual, SLIDING, FULL)
    return [fields.size("sliding_window") if kind == SLIDING else None for kind in types]


def text_fields(fields: ConfigFields, *types: str, defaults: Mapping[str, Any] = {}) -> ConfigFields:
    """The fields of the text model among those of a model that also takes images.

    types: the text model's supported `model_type`s. defaults: values for missing fields. The outer object's own field
    decides whether the embeddings are tied, as in transformers.
    """
    inner = fields.inner("text_config")
    if inner.get("model_type", types[0]) not in types:
        raise fields.error(
            f"model_type {inner['model_type']!r} in text_config is not supported; must be {' or '.join(types)}"
        )
    text = inner.values
    tied = {} if fields.get("tie_word_embeddings") is None else {"tie_word_embeddings": fields["tie_word_embeddings"]}
    return ConfigFields(fields.name, {**defaults, **text, **tied, "model_type": fields["model_type"]})


def rotary_share(fields: ConfigFields, usual: float) -> ConfigFields:
    """The fields with the share of a head that is rotated. usual: the default if the file sets none."""
    if fields.rope.get("partial_rotary_factor") is not None or fields.get("partial_rotary_factor") is not None:
        return fields
    return fields.with_values(partial_rotary_factor=usual)
