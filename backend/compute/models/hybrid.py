"""The hybrid decoder of Qwen3-Next and Qwen3.5: three layers with gated DeltaNet, then one with gated attention.

Their files differ in the prefix of the layers' names, and in the fused matrices. The fields of Qwen3.5's text model may
be inside the fields of a model that also takes images. No JAX.
"""

from __future__ import annotations

from dataclasses import replace

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count, rotary_share
from tinkerflow.backend.compute.models.family import Tensors, renamed
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers import MLP, Attention, DecoderLayer, Experts, GatedDeltaNet, RMSNorm
from tinkerflow.backend.compute.models.rope import FULL, LINEAR
from tinkerflow.backend.compute.models.vision_config import read_vision

SKIPPED = ("mtp.",)  # layers that predict several tokens
_EVERY = 4  # if `layer_types` is missing, every 4th layer has full attention
_ROTARY = 0.25  # the share of a head that is rotated, if the file sets none


def hybrid(fields: ConfigFields, *, fused: bool = False, experts: bool = False) -> ModelConfig:
    """The config of a hybrid decoder.

    fields: the text model's fields. fused: as in GatedDeltaNet. experts: a mixture with a shared expert replaces each
    MLP. UserError: a field is missing or not supported.
    """
    fields.refuse_others(attn_output_gate=True)
    norm = RMSNorm.read(fields, plus_one=True)
    attention = Attention.read(rotary_share(fields, _ROTARY), partial=True, qk_norm="each head", norm=norm, gated=True)
    delta = GatedDeltaNet.read(fields, fused=fused, norm_eps=norm.eps)
    if experts:
        shared = MLP(
            attention.hidden,
            fields.size("shared_expert_intermediate_size"),
            prefix="shared_",
            module="mlp.shared_expert",
        )
        mixture = Experts.read(fields, normalized=True)
        mlp: MLP | Experts = replace(mixture, shared=shared, shared_gate="mlp.shared_expert_gate")
    else:
        mlp = MLP.read(fields)
    types = _layer_types(fields, layer_count(fields))
    return decoder(fields, norm, [DecoderLayer(delta if kind == LINEAR else attention, mlp, norm) for kind in types])


def with_tower(cfg: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """The config with the vision tower that the outer `fields` describe, if any."""
    if fields.get("vision_config") is None:
        return cfg
    return replace(cfg, vision=read_vision(fields, sections=(11, 11, 10)))


def with_tower_named(cfg: ModelConfig, tensors: Tensors) -> Tensors:
    """The tensors, with the published names for the vision tower's tensors. transformers 5.5 writes other names."""
    return renamed(tensors, lambda name: name.replace("model.language_model.visual.", "model.visual.", 1))


def _layer_types(fields: ConfigFields, layers: int) -> list[str]:
    """The type of every layer."""
    every = fields.size("full_attention_interval", _EVERY)
    usual = [FULL if number % every == 0 else LINEAR for number in range(1, layers + 1)]
    types = fields.types("layer_types", usual, LINEAR, FULL)
    if len(set(types)) != 2:
        raise fields.error(f"layer_types are all {types[0]!r}; there must be layers of both kinds")
    return types
