"""The text model of Gemma 4. Most layers have windows. The others have wider heads, and keys that may also be values.

In small models (E2B, E4B), every layer has its own input for each token, and the last layers read the keys and values
of earlier layers. Some models have experts in addition to each MLP.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

from tinkerflow.backend.compute.models.config import ModelConfig
from tinkerflow.backend.compute.models.decoder import decoder, layer_count, windows
from tinkerflow.backend.compute.models.family import Family, Tensors
from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.fused_experts import with_separate_experts
from tinkerflow.backend.compute.models.layers import (
    GLOBAL,
    MLP,
    SANDWICH_NORM,
    Attention,
    DecoderLayer,
    Experts,
    LayerInput,
    RMSNorm,
    SoftmaxRouter,
)
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor, Projection
from tinkerflow.backend.compute.models.rope import FULL, SLIDING, ProportionalRope, Rope, read_ropes

if TYPE_CHECKING:
    import jax

    from tinkerflow.backend.compute.models.layers.step import LayerStep

# transformers' defaults, which Google's files may leave out.
_DEFAULTS = {
    "vocab_size": 262_144,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "global_head_dim": 512,
    "max_position_embeddings": 131_072,
    "sliding_window": 512,
    "hidden_size_per_layer_input": 256,
}
_EVERY = 6  # if `layer_types` is missing, every 6th layer has full attention


class _ParallelNorms(NamedTuple):
    """Norms of the MLP's result, of the experts' input and result, and of the router's input, each [D]."""

    shared_out_norm: jax.Array
    experts_norm: jax.Array
    experts_out_norm: jax.Array
    router_norm: jax.Array


@dataclass(frozen=True)
class MLPBesideExperts:
    """An MLP and experts in parallel, each with its own norm of the layer's hidden states. Their sum is added."""

    mlp: MLP
    experts: Experts
    norm: RMSNorm

    @property
    def mixture(self) -> Experts:
        return self.experts

    def projections(self) -> dict[str, Projection]:
        """The matrices of the MLP and the experts, by our names."""
        return {**self.mlp.projections(), **self.experts.projections()}

    def tensors(self) -> dict[str, LayerTensor]:
        """The router and the norms, by our names."""
        names = {
            "router_norm": "router.scale",
            "shared_out_norm": "post_feedforward_layernorm_1.weight",
            "experts_norm": "pre_feedforward_layernorm_2.weight",
            "experts_out_norm": "post_feedforward_layernorm_2.weight",
        }
        norms = {name: LayerTensor(tensor, (self.mlp.hidden,)) for name, tensor in names.items()}
        return {**self.experts.tensors(), **norms}

    def __call__(self, step: LayerStep, x_BTD: jax.Array, y_BTD: jax.Array) -> Iterator[jax.Array]:
        """The term that is added to x_BTD. y_BTD: x_BTD after the MLP's norm."""
        norms = step.weights(_ParallelNorms)
        mlp_BTD = self.norm(self.mlp.forward(step, y_BTD), norms.shared_out_norm)
        routed_BTD = self.norm(x_BTD, norms.router_norm) * self.mlp.hidden**-0.5
        mixed_BTD = self.experts.forward(step, self.norm(x_BTD, norms.experts_norm), routed_BTD)
        yield mlp_BTD + self.norm(mixed_BTD, norms.experts_out_norm)


def gemma4(fields: ConfigFields) -> ModelConfig:
    """The config of the text model. UserError: a field is missing or not supported."""
    fields = _without_layer_config(fields.with_defaults(**_DEFAULTS))
    fields.refuse_others(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention="vision")
    norm = RMSNorm.read(fields)
    attentions = _attentions(fields, norm)
    hidden, count = attentions[0].hidden, layer_count(fields)
    mlp = MLP.read(fields.without("hidden_act"), activation="gelu")
    experts = _experts(fields, norm, mlp) if fields.flag("enable_moe_block") else None
    wide = replace(mlp, width=2 * mlp.width, prefix="dense_") if fields.flag("use_double_wide_mlp") else mlp
    width = fields["hidden_size_per_layer_input"]
    if width and fields.get("vocab_size_per_layer_input", fields["vocab_size"]) != fields["vocab_size"]:
        raise fields.error(
            f"vocab_size_per_layer_input {fields['vocab_size_per_layer_input']!r} is not supported; must be vocab_size "
            f"{fields['vocab_size']}"
        )
    layer_input = LayerInput(hidden, fields.size("hidden_size_per_layer_input"), norm) if width else None
    layers = [
        DecoderLayer(
            attention,
            experts or (mlp if attention.shares is None else wide),
            norm,
            SANDWICH_NORM,
            layer_input=layer_input,
            scaled=True,
        )
        for attention in attentions
    ]
    assert len(layers) == count
    softcap = fields.number("final_logit_softcapping", 0.0)
    types = [SLIDING if attention.window else FULL for attention in attentions]  # the last one is FULL
    return decoder(
        fields.with_values(layer_types=types), norm, layers, tied=True, embed_scale=hidden**0.5, softcap=softcap
    )


def _layer_types(fields: ConfigFields) -> list[str]:
    """The type of every layer. The last one is FULL, as in transformers, for any `layer_types`."""
    usual = [FULL if (layer + 1) % _EVERY == 0 else SLIDING for layer in range(layer_count(fields))]
    return [*fields.types("layer_types", usual, SLIDING, FULL)[:-1], FULL]


def _without_layer_config(fields: ConfigFields) -> ConfigFields:
    """The fields without `per_layer_config`, in which newer releases of transformers write the sizes of FULL layers.

    UserError: other layers or fields differ from the rest, or FULL layers differ from each other.
    """
    if fields.get("per_layer_config") is None:
        return fields
    usual = {name: fields[name] for name in ("head_dim", "num_key_value_heads")}
    differ = ["head_dim", "num_key_value_heads"] if fields.flag("attention_k_eq_v") else ["head_dim"]
    found = {}
    for layer, values in fields.inner("per_layer_config").values.items():
        own = values if isinstance(values, dict) else {"": values}
        found[layer.lstrip("0") or "0"] = {name: value for name, value in own.items() if usual.get(name) != value}
    types = _layer_types(fields)
    full = found.get(str(len(types) - 1), {})
    expected = {str(layer): full for layer, kind in enumerate(types) if kind == FULL and full}
    if {layer: own for layer, own in found.items() if own} != expected or not set(full) <= set(differ):
        raise fields.error(
            f"per_layer_config {fields['per_layer_config']!r} is not supported; may only change "
            f"{' and '.join(differ)}, in the same way for all layers of {FULL}"
        )
    return fields.without("per_layer_config").with_values(
        global_head_dim=full.get("head_dim", fields["head_dim"]),
        num_global_key_value_heads=full.get("num_key_value_heads"),
    )


def _attentions(fields: ConfigFields, norm: RMSNorm) -> list[Attention]:
    """The attention of every layer."""
    local = Attention.read(fields, one_rope=False, qk_norm="each head", norm=norm, value_norm=True)
    same = fields.flag("attention_k_eq_v")
    kv_heads = fields.size("num_global_key_value_heads", local.kv_heads) if same else local.kv_heads
    head_dim = fields.size("global_head_dim", local.head_dim)
    if local.heads % kv_heads or head_dim % 2:
        raise fields.error(
            f"{local.heads} heads, num_global_key_value_heads {kv_heads}, global_head_dim {head_dim}; "
            "key-value heads must divide heads and global_head_dim must be even"
        )
    # Scores are not divided by sqrt(head_dim): the norms of q and k have learned scales.
    rope = read_ropes(fields, local.head_dim).get(SLIDING, Rope(10_000.0, local.head_dim))
    local = replace(local, rope=rope, query_scale=local.head_dim**0.5)
    rope = read_ropes(fields, head_dim).get(FULL, Rope(1_000_000.0, head_dim, ProportionalRope(1.0, 0.25)))
    wide = replace(
        local,
        kv_heads=kv_heads,
        head_dim=head_dim,
        rope=rope,
        query_scale=head_dim**0.5,
        keys_are_values=same,
        pool=GLOBAL,
    )
    types = _layer_types(fields)
    count = len(types)
    layers = [
        replace(local, window=window) if window else wide
        for window in windows(fields.with_values(layer_types=types), types)
    ]
    shared = fields.size("num_kv_shared_layers") if fields.get("num_kv_shared_layers") else 0
    first = count - shared if 0 < shared < count else count
    homes = {layer.pool: number for number, layer in enumerate(layers[:first])}
    if missing := {layer.pool for layer in layers[first:]} - set(homes):
        raise fields.error(
            f"num_kv_shared_layers {shared}: no layer before the last {shared} is a {missing.pop()} one, whose keys "
            "and values later ones share; there must be one of each kind"
        )
    return [
        replace(layer, shares=homes[layer.pool]) if number >= first else layer for number, layer in enumerate(layers)
    ]


def _experts(fields: ConfigFields, norm: RMSNorm, mlp: MLP) -> MLPBesideExperts:
    count = fields.size("num_experts")
    router = SoftmaxRouter(
        fields.chosen_experts(count, "top_k_experts"),
        normalized=True,
        expert_scales="router.per_expert_scale",
        module="router.proj",
    )
    if fields.flag("use_double_wide_mlp"):
        raise fields.error("use_double_wide_mlp true is not supported with enable_moe_block; must be false")
    width = fields.size("moe_intermediate_size")
    experts = Experts(mlp.hidden, count, width, router, activation="gelu", module="experts.{}.")
    return MLPBesideExperts(replace(mlp, prefix="shared_"), experts, norm)


def unpack_gemma4(cfg: ModelConfig, tensors: Tensors, layer: str = "model.layers.{}.") -> Tensors:
    """The tensors with a matrix for each expert, and without the tensors for keys and values that no layer uses.

    cfg: the model. tensors: by name. layer: the prefix of names in a layer, with a {} for its number.
    """
    unused = tuple(
        f"{layer.format(number)}self_attn.{part}."
        for number, decoder_layer in enumerate(cfg.decoder_layers)
        if decoder_layer.shares is not None
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    used = {name: tensor for name, tensor in tensors.items() if not name.startswith(unused)}
    return with_separate_experts(cfg, used, f"{layer}experts.") if cfg.experts else used


FAMILY = Family(model_type="gemma4_text", title="Gemma 4 (text)", parse=gemma4, unpack=unpack_gemma4)
