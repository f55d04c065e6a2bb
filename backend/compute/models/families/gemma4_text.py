"""Gemma 4, the text model: windows in most layers, wider heads in the others, which may have keys for values.

Small ones (E2B, E4B) give every layer an input of its own for each token, and their last layers read the keys and
values of earlier ones. Others have experts beside each MLP.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tinkerflow.backend.compute.models.config import ATTENTION, GLOBAL, ConfigFields, Heads, LayerKind, ModelConfig
from tinkerflow.backend.compute.models.decoder import (
    FULL,
    SLIDING,
    TEXT,
    LayerTensor,
    Projection,
    decoder_config,
    read_ropes,
    windowed,
)
from tinkerflow.backend.compute.models.families import Family
from tinkerflow.backend.compute.models.families.gemma3_text import gemma_tensors
from tinkerflow.backend.compute.models.fused_experts import with_experts_apart
from tinkerflow.backend.compute.models.rope import ProportionalRope, Rope
from tinkerflow.backend.compute.weights.files import Tensor

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
_EVERY = 6  # layers with full attention, where `layer_types` is missing


def parse_gemma4(fields: ConfigFields) -> ModelConfig:
    """The config of the text model. UserError names a field that is missing or not supported."""
    fields = replace(fields, values={**_DEFAULTS, **fields.values})
    fields.refuse_others(hidden_activation="gelu_pytorch_tanh", use_bidirectional_attention="vision")
    config = decoder_config(fields, qk_norm=True, tied=True, computed=("hidden_act",))
    if fields.get("vocab_size_per_layer_input", config.vocab) != config.vocab and fields["hidden_size_per_layer_input"]:
        raise fields.error(
            f"vocab_size_per_layer_input {fields['vocab_size_per_layer_input']!r} is not supported; must be vocab_size "
            f"{config.vocab}"
        )
    twins = bool(fields.get("attention_k_eq_v"))
    wide = Heads(
        fields.size("num_global_key_value_heads", config.kv_heads) if twins else config.kv_heads,
        fields.size("global_head_dim", config.head_dim),
        values=not twins,
    )
    if config.heads % wide.kv_heads or wide.head_dim % 2:
        raise fields.error(
            f"{config.heads} heads, num_global_key_value_heads {wide.kv_heads}, global_head_dim {wide.head_dim}; "
            "key-value heads must divide heads and global_head_dim must be even"
        )
    config = replace(
        config,
        gelu=True,
        embed_scale=config.hidden**0.5,
        unscaled=True,
        v_norm=True,
        global_heads=wide,
        layer_input=fields.size("hidden_size_per_layer_input") if fields["hidden_size_per_layer_input"] else 0,
        softcap=float(fields.get("final_logit_softcapping") or 0),
    )
    config = replace(config, kinds=_kinds(fields, config))
    if fields.get("use_double_wide_mlp"):
        config = replace(
            config,
            dense_mlp=2 * config.mlp,
            kinds=tuple(replace(kind, dense=kind.shares is not None) for kind in config.kinds),
        )
    return _with_experts(fields, config) if fields.get("enable_moe_block") else config


def _with_experts(fields: ConfigFields, config: ModelConfig) -> ModelConfig:
    experts = fields.size("num_experts")
    chosen = fields.chosen_experts(experts, "top_k_experts")
    if config.dense_mlp:
        raise fields.error("use_double_wide_mlp true is not supported with enable_moe_block; it must be false")
    return replace(
        config,
        experts=experts,
        experts_per_token=chosen,
        norm_topk=True,
        shared_mlp=config.mlp,
        mlp=fields.size("moe_intermediate_size"),
    )


def _kinds(fields: ConfigFields, config: ModelConfig) -> tuple[LayerKind, ...]:
    """The kind of every layer."""
    assert config.global_heads is not None
    ropes = {
        mixer: read_ropes(fields, config.heads_of(mixer).head_dim).get(name, usual)
        for mixer, name, usual in (
            (ATTENTION, SLIDING, Rope(10_000.0, config.head_dim)),
            (GLOBAL, FULL, Rope(1_000_000.0, config.global_heads.head_dim, ProportionalRope(1.0, 0.25))),
        )
    }
    usual = [FULL if (layer + 1) % _EVERY == 0 else SLIDING for layer in range(config.layers)]
    types = [*(fields.get("layer_types") or usual)[:-1], FULL]  # as transformers has it, whatever the file says
    kinds = windowed(replace(fields, values={**fields.values, "layer_types": types}), config, usual).layer_kinds
    mixers = [ATTENTION if kind.window else GLOBAL for kind in kinds]
    shared = fields.size("num_kv_shared_layers") if fields.get("num_kv_shared_layers") else 0
    first = config.layers - shared if 0 < shared < config.layers else config.layers
    homes = {mixer: number for number, mixer in enumerate(mixers[:first])}
    if missing := set(mixers[first:]) - set(homes):
        raise fields.error(
            f"num_kv_shared_layers {shared}: no layer before the last {shared} is a {missing.pop()} one, whose keys "
            "and values later ones share; there must be one of each kind"
        )
    return tuple(
        replace(kind, rope=ropes[mixer], mixer=mixer, shares=homes[mixer] if number >= first else None)
        for number, (kind, mixer) in enumerate(zip(kinds, mixers, strict=True))
    )


def gemma4_projections(cfg: ModelConfig, layer: str = TEXT) -> dict[str, Projection]:
    """Every matrix by the name that `transformer` uses. layer: what Hugging Face's names in a layer begin with."""
    found: dict[str, Projection] = {}

    def add(name: str, module: str, inputs: int, outputs: int, layers: tuple[int, ...]) -> None:
        if layers:
            switch: Any = "train_attn" if module.startswith("self_attn") else "train_mlp"
            found[name] = Projection(f"{layer}{module}", inputs, outputs, switch, (len(layers),), layers=layers)

    for mixer, end in ((ATTENTION, ""), (GLOBAL, "@global")):
        own, layers = cfg.heads_of(mixer), _numbers(cfg, mixer)
        queries, keys = cfg.heads * own.head_dim, own.kv_heads * own.head_dim
        add(f"q{end}", "self_attn.q_proj", cfg.hidden, queries, layers)
        add(f"k{end}", "self_attn.k_proj", cfg.hidden, keys, cfg.numbers(mixer))
        add(f"v{end}", "self_attn.v_proj", cfg.hidden, keys, cfg.numbers(mixer) if own.values else ())
        add(f"o{end}", "self_attn.o_proj", queries, cfg.hidden, layers)

    def add_mlp(prefix: str, width: int, layers: tuple[int, ...]) -> None:
        add(f"{prefix}gate", "mlp.gate_proj", cfg.hidden, width, layers)
        add(f"{prefix}up", "mlp.up_proj", cfg.hidden, width, layers)
        add(f"{prefix}down", "mlp.down_proj", width, cfg.hidden, layers)

    every = tuple(range(cfg.layers))
    if cfg.experts:
        add_mlp("shared_", cfg.shared_mlp, every)
        stack, sizes = (cfg.layers, cfg.experts), {"gate": (cfg.hidden, cfg.mlp), "up": (cfg.hidden, cfg.mlp)}
        for name, (inputs, outputs) in {**sizes, "down": (cfg.mlp, cfg.hidden)}.items():
            module = f"{layer}experts.{{}}.{name}_proj"
            found[name] = Projection(module, inputs, outputs, "train_mlp", stack, per_token=cfg.experts_per_token)
    else:
        dense = tuple(number for number in every if cfg.layer_kinds[number].dense)
        add_mlp("", cfg.mlp, tuple(number for number in every if number not in dense))
        add_mlp("dense_", cfg.dense_mlp, dense)
    return {**found, "unembed": Projection("lm_head", cfg.hidden, cfg.vocab, "train_unembed", ())}


def gemma4_tensors(cfg: ModelConfig, layer: str = TEXT) -> dict[str, LayerTensor]:
    """Norms, scalars, routers and the gates of layers' own inputs by the name that `transformer` uses.

    cfg: the model. layer: as of `gemma4_projections`.
    """
    # The router is another one than that of other families, and so are the norms of heads.
    tensors = gemma_tensors(replace(cfg, experts=0, qk_norm=False), layer)
    for mixer, end in ((ATTENTION, ""), (GLOBAL, "@global")):
        homes = {"q": _numbers(cfg, mixer), "k": cfg.numbers(mixer)}
        tensors |= {
            f"{name}_norm{end}": LayerTensor(
                f"{layer}self_attn.{name}_norm.weight", (cfg.heads_of(mixer).head_dim,), layers=layers
            )
            for name, layers in homes.items()
            if layers
        }
    tensors["layer_scalar"] = LayerTensor(f"{layer}layer_scalar", (1,), frozen=True)
    sizes: dict[str, tuple[str, tuple[int, ...]]] = {}
    if cfg.layer_input:
        sizes |= {
            "input_gate": ("per_layer_input_gate.weight", (cfg.layer_input, cfg.hidden)),
            "input_projection": ("per_layer_projection.weight", (cfg.hidden, cfg.layer_input)),
            "input_norm": ("post_per_layer_input_norm.weight", (cfg.hidden,)),
        }
    if cfg.experts:
        sizes |= {
            "router": ("router.proj.weight", (cfg.experts, cfg.hidden)),
            "router_norm": ("router.scale", (cfg.hidden,)),
            "expert_scale": ("router.per_expert_scale", (cfg.experts,)),
            "shared_out_norm": ("post_feedforward_layernorm_1.weight", (cfg.hidden,)),
            "experts_norm": ("pre_feedforward_layernorm_2.weight", (cfg.hidden,)),
            "experts_out_norm": ("post_feedforward_layernorm_2.weight", (cfg.hidden,)),
        }
    return tensors | {name: LayerTensor(f"{layer}{tensor}", shape) for name, (tensor, shape) in sizes.items()}


def gemma4_inputs(cfg: ModelConfig, model: str = "model.") -> dict[str, tuple[str, tuple[int, ...]]]:
    """The tensors that make layers' own inputs. cfg: the model. model: what Hugging Face's names begin with."""
    if not cfg.layer_input:
        return {}
    every = cfg.layers * cfg.layer_input
    return {
        "embed": (f"{model}embed_tokens_per_layer.weight", (cfg.vocab, every)),
        "projection": (f"{model}per_layer_model_projection.weight", (every, cfg.hidden)),
        "norm": (f"{model}per_layer_projection_norm.weight", (cfg.layer_input,)),
    }


def gemma4_unpacked(cfg: ModelConfig, tensors: Mapping[str, Tensor], layer: str = TEXT) -> Mapping[str, Tensor]:
    """The tensors with a matrix for each expert, and without those of keys and values that no layer computes.

    cfg: the model. tensors: by name. layer: as of `gemma4_projections`.
    """
    unused = tuple(
        f"{layer.format(number)}self_attn.{part}."
        for number, kind in enumerate(cfg.layer_kinds)
        if kind.shares is not None
        for part in ("k_proj", "v_proj", "k_norm", "v_norm")
    )
    kept = {name: tensor for name, tensor in tensors.items() if not name.startswith(unused)}
    return with_experts_apart(cfg, kept, f"{layer}experts.") if cfg.experts else kept


def _numbers(cfg: ModelConfig, mixer: str) -> tuple[int, ...]:
    """The numbers of all layers with this mixer."""
    return tuple(number for number, kind in enumerate(cfg.layer_kinds) if kind.mixer == mixer)


FAMILY = Family(
    model_type="gemma4_text",
    title="Gemma 4 (text)",
    parse=parse_gemma4,
    projections=gemma4_projections,
    tensors=gemma4_tensors,
    unpack=gemma4_unpacked,
    inputs=gemma4_inputs,
)
