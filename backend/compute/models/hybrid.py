"""The hybrid decoder of Qwen3-Next and Qwen3.5: three layers with gated DeltaNet, then one with gated attention.

Their files differ in names: what the layers' names begin with, which matrices are one tensor, and whether the fields of
the text model are inside those of a model that also sees images. No JAX.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from tinkerflow.backend.compute.models.config import ConfigFields, DeltaNet, LayerKind, ModelConfig
from tinkerflow.backend.compute.models.decoder import (
    TEXT,
    LayerTensor,
    Projection,
    decoder_config,
    decoder_projections,
    decoder_tensors,
    rotary_share,
    with_mixture,
)
from tinkerflow.backend.compute.models.vision_config import read_vision
from tinkerflow.backend.compute.weights.files import Tensor

SKIPPED = ("mtp.",)  # what predicts several tokens
_MIXERS = {"linear_attention": "delta", "full_attention": "attention"}
_EVERY = 4  # layers with full attention, where `layer_types` is missing
_ROTARY = 0.25  # the share of a head that turns, where the file does not say


def hybrid_config(fields: ConfigFields, *, fused: bool = False, experts: bool = False) -> ModelConfig:
    """The config of a hybrid decoder.

    fields: of the text model. fused: as in DeltaNet. experts: a mixture in place of each MLP, beside a shared expert.
    UserError names a field that is missing, or the value of one that asks for something this decoder does not compute.
    """
    fields = rotary_share(fields, _ROTARY)
    config = decoder_config(fields, mlp="moe_intermediate_size" if experts else "intermediate_size", qk_norm=True)
    fields.refuse_others(attn_output_gate=True)
    delta = DeltaNet(
        key_heads=fields.size("linear_num_key_heads"),
        value_heads=fields.size("linear_num_value_heads"),
        key_dim=fields.size("linear_key_head_dim"),
        value_dim=fields.size("linear_value_head_dim"),
        taps=fields.size("linear_conv_kernel_dim"),
        fused=fused,
    )
    if delta.value_heads % delta.key_heads or delta.taps < 2:
        raise fields.error(
            f"linear_num_key_heads {delta.key_heads}, linear_num_value_heads {delta.value_heads}, "
            f"linear_conv_kernel_dim {delta.taps}; key heads must divide value heads, and the kernel be at least 2"
        )
    kinds = tuple(
        LayerKind(rope=config.rope) if mixer == "attention" else LayerKind(rope=None, mixer=mixer)
        for mixer in _mixers(fields, config.layers)
    )
    config = replace(config, kinds=kinds, norm_plus_one=True, gated=True, delta=delta)
    if not experts:
        return config
    config = with_mixture(config, fields, norm_topk=True)
    return replace(config, shared_mlp=fields.size("shared_expert_intermediate_size"))


def with_tower(cfg: ModelConfig, fields: ConfigFields) -> ModelConfig:
    """The config with the tower that the whole model's `fields` describe, if they do."""
    if fields.get("vision_config") is None:
        return cfg
    return replace(cfg, vision=read_vision(fields, sections=(11, 11, 10)))


def with_tower_named(cfg: ModelConfig, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of a model that may see, the tower's by their published names: transformers 5.5 writes others."""
    written = "model.language_model.visual."
    return {f"model.visual.{name.removeprefix(written)}" if name.startswith(written) else name: tensor
            for name, tensor in tensors.items()}  # fmt: skip


def hybrid_projections(cfg: ModelConfig, layer: str = TEXT) -> dict[str, Projection]:
    """Every matrix by the name that `transformer` uses. layer: what Hugging Face's names in a layer begin with."""
    assert cfg.delta is not None
    delta, hidden = cfg.delta, cfg.hidden
    attention, linear = cfg.numbers("attention"), cfg.numbers("delta")

    def mixer(name: str, inputs: int, outputs: int) -> Projection:
        return Projection(f"{layer}linear_attn.{name}", inputs, outputs, "train_attn", (len(linear),), layers=linear)

    if delta.fused:
        inner = {
            "in_qkvz": mixer("in_proj_qkvz", hidden, delta.channels + delta.values),
            "in_ba": mixer("in_proj_ba", hidden, 2 * delta.value_heads),
        }
    else:
        inner = {
            "in_qkv": mixer("in_proj_qkv", hidden, delta.channels),
            "in_z": mixer("in_proj_z", hidden, delta.values),
            "in_b": mixer("in_proj_b", hidden, delta.value_heads),
            "in_a": mixer("in_proj_a", hidden, delta.value_heads),
        }
    plain = decoder_projections(cfg, layer)
    of_attention = {name: replace(plain.pop(name), stack=(len(attention),), layers=attention) for name in "qkvo"}
    of_attention["q"] = replace(of_attention["q"], outputs=2 * of_attention["q"].outputs)
    shared = {}
    if cfg.shared_mlp:
        sizes = {"gate": (hidden, cfg.shared_mlp), "up": (hidden, cfg.shared_mlp), "down": (cfg.shared_mlp, hidden)}
        shared = {
            f"shared_{name}": Projection(
                f"{layer}mlp.shared_expert.{name}_proj", inputs, outputs, "train_mlp", (cfg.layers,)
            )
            for name, (inputs, outputs) in sizes.items()
        }
    return {**of_attention, **inner, "out": mixer("out_proj", delta.values, hidden), **shared, **plain}


def hybrid_tensors(cfg: ModelConfig, layer: str = TEXT) -> dict[str, LayerTensor]:
    """Norms, the convolution, the decays and the routers by the name that `transformer` uses. layer: as above."""
    assert cfg.delta is not None
    delta, attention, linear = cfg.delta, cfg.numbers("attention"), cfg.numbers("delta")

    def mixer(name: str, *shape: int, wide: bool = False) -> LayerTensor:
        return LayerTensor(f"{layer}linear_attn.{name}", shape, wide=wide, layers=linear)

    tensors = {
        name: replace(tensor, layers=attention) if name in ("q_norm", "k_norm") else tensor
        for name, tensor in decoder_tensors(cfg, layer).items()
    }
    if cfg.shared_mlp:
        tensors["shared_router"] = LayerTensor(f"{layer}mlp.shared_expert_gate.weight", (1, cfg.hidden))
    return tensors | {
        "conv": mixer("conv1d.weight", delta.channels, 1, delta.taps),
        "A_log": mixer("A_log", delta.value_heads, wide=True),
        "dt_bias": mixer("dt_bias", delta.value_heads, wide=True),
        "out_norm": mixer("norm.weight", delta.value_dim),
    }


def _mixers(fields: ConfigFields, layers: int) -> list[str]:
    """The mixer of every layer."""
    every = fields.size("full_attention_interval", _EVERY)
    usual = ["full_attention" if number % every == 0 else "linear_attention" for number in range(1, layers + 1)]
    types = fields.get("layer_types") or usual
    if not isinstance(types, list) or len(types) != layers or not set(types) <= set(_MIXERS):
        raise fields.error(f"layer_types {types!r}; must be {layers} of {', '.join(_MIXERS)}")
    if set(types) != set(_MIXERS):
        raise fields.error(f"layer_types are all {types[0]!r}; there must be layers of both kinds")
    return [_MIXERS[kind] for kind in types]
