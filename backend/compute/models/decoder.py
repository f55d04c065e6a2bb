"""The decoder that the families are variants of: its fields in `config.json`, its matrices and its other tensors.

A family that is built alike takes these functions as they are, or changes what they return. No JAX.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from tinkerflow.backend.compute.models.config import ConfigFields, LayerKind, ModelConfig
from tinkerflow.backend.compute.models.rope import Rope, read_rope

_ROPE_FIELDS = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")  # outside of the rope's own
FULL, SLIDING = "full_attention", "sliding_attention"  # of `layer_types`
TEXT, VISION_TEXT = "model.layers.{}.", "model.language_model.layers.{}."  # what names in a layer begin with
PRE_NORMS = {"attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"}
POST_NORMS = {"attn_out_norm": "post_attention_layernorm", "mlp_out_norm": "post_feedforward_layernorm"}

# Matrices whose inputs the tensor axis splits: their outputs are summed over it. Of the others it splits the outputs.
ROW_PARALLEL = ("o", "down", "out", "shared_down", "dense_down")


def plain_name(name: str) -> str:
    """What `transformer` calls a matrix or tensor inside of a layer: `q` of `q@global`.

    Where layers have matrices of other shapes in the same place, those of some have a suffix to stack them apart.
    """
    return name.partition("@")[0]


@dataclass(frozen=True)
class Projection:
    """A matrix that activations are multiplied by and that LoRA can adapt. Hugging Face stores it [outputs, inputs].

    module: Hugging Face's name, with a `{}` for each axis of `stack`: the layer, then the expert.
    switch: the field of LoraSpec that adapts it. stack: how many there are, by layer and by expert.
    per_token: how many of a layer's matrices one token goes through. layers: the numbers of the layers that have it;
    None = all.
    """

    module: str
    inputs: int
    outputs: int
    switch: Literal["train_attn", "train_mlp", "train_unembed"]
    stack: tuple[int, ...]
    per_token: int = 1
    layers: tuple[int, ...] | None = None

    def name(self, place: tuple[int, ...]) -> str:
        """Hugging Face's name of the module at a place of the stack."""
        return self.module.format(*((self.layers[place[0]], *place[1:]) if self.layers else place))

    @property
    def of_experts(self) -> bool:
        """Whether every expert of a layer has such a matrix."""
        return len(self.stack) == 2


@dataclass(frozen=True)
class LayerTensor:
    """A tensor that each layer has and that LoRA does not adapt: a norm, a bias, a router.

    tensor: Hugging Face's name, with a `{}` for the layer. split: the mesh's tensor axis splits its first dimension.
    layers: the numbers of the layers that have it; None = all. wide: it is kept in float32. frozen: it stays as
    published when all parameters are trained; transformers has it as a buffer.
    """

    tensor: str
    shape: tuple[int, ...]
    split: bool = False
    layers: tuple[int, ...] | None = None
    wide: bool = False
    frozen: bool = False


def decoder_config(
    fields: ConfigFields,
    *,
    mlp: str = "intermediate_size",
    qk_norm: bool = False,
    qkv_bias: bool = False,
    rope_theta: float = 10_000.0,
    tied: bool = False,
    computed: Collection[str] = (),
) -> ModelConfig:
    """The config of a dense decoder, its architecture the field `model_type`.

    fields: of `config.json`. mlp: the field with the MLP's width. qk_norm and qkv_bias: as in ModelConfig. rope_theta:
    where the file has none. tied: where the file does not say. computed: fields that the family sees to, so that no
    value of theirs is refused here. UserError names a field that is missing, or the value of one that asks for
    something this decoder does not compute.
    """
    heads, hidden = fields.size("num_attention_heads"), fields.size("hidden_size")
    head_dim = fields.size("head_dim", hidden // heads)
    ropes = read_ropes(fields, head_dim, rope_theta)
    rope = ropes.get("") or ropes.get(FULL) or next(iter(ropes.values()))
    config = ModelConfig(
        architecture=fields["model_type"],
        vocab=fields.size("vocab_size"),
        hidden=hidden,
        layers=fields.size("num_hidden_layers"),
        heads=heads,
        kv_heads=fields.size("num_key_value_heads", heads),
        head_dim=head_dim,
        mlp=fields.size(mlp),
        norm_eps=float(fields.get("rms_norm_eps", 1e-6)),
        rope_theta=rope.theta,
        rope_scaling=rope.scaling,
        max_positions=fields.size("max_position_embeddings"),
        tied=bool(fields.get("tie_word_embeddings", tied)),
        qk_norm=qk_norm,
        qkv_bias=qkv_bias,
        rotary_dims=0 if rope.dims == head_dim else rope.dims,
    )
    plain = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "use_sliding_window": False}
    fields.refuse_others(**{key: value for key, value in plain.items() if key not in computed})
    if config.heads % config.kv_heads or config.head_dim % 2:
        raise fields.error(
            f"{config.heads} heads, {config.kv_heads} key-value heads, head_dim {config.head_dim}; "
            "key-value heads must divide heads and head_dim must be even"
        )
    return config


def with_mixture(cfg: ModelConfig, fields: ConfigFields, *, norm_topk: bool) -> ModelConfig:
    """The config with a mixture of experts in place of every layer's MLP.

    fields: of `config.json`. norm_topk: as in ModelConfig, where the file does not say. UserError names a field that
    is missing, or a value that asks for layers without experts.
    """
    fields.refuse_others(decoder_sparse_step=1, mlp_only_layers=[])
    # transformers 5 writes num_local_experts; earlier releases, and most of the hub, num_experts.
    number = "num_experts" if fields.get("num_experts") is not None else "num_local_experts"
    experts = fields.size(number)
    active = fields.chosen_experts(experts)
    normed = bool(fields.get("norm_topk_prob", norm_topk))
    return replace(cfg, experts=experts, experts_per_token=active, norm_topk=normed)


def windowed(fields: ConfigFields, cfg: ModelConfig, layer_types: Sequence[str]) -> ModelConfig:
    """The config with a window of `sliding_window` tokens in the layers that have one.

    fields: of `config.json`; its own `layer_types` go before `layer_types`, one of SLIDING and FULL for each layer.
    UserError names a type that we do not compute, or a wrong number of them.
    """
    types = fields.get("layer_types") or layer_types
    if len(types) != cfg.layers or not set(types) <= {SLIDING, FULL}:
        raise fields.error(f"layer_types {list(types)}; must be {cfg.layers} of {SLIDING!r} and {FULL!r}")
    if SLIDING not in types:
        return cfg
    kinds = {SLIDING: LayerKind(cfg.rope, fields.size("sliding_window")), FULL: LayerKind(cfg.rope)}
    return replace(cfg, kinds=tuple(kinds[each] for each in types))


def text_fields(fields: ConfigFields, defaults: Mapping[str, Any] = {}) -> ConfigFields:
    """The fields of the text model in those of a model that also sees images; `defaults` where its file has none.

    Whether the embeddings are tied is said by the whole model's own field, as in transformers.
    """
    text = fields.inner("text_config").values
    tied = {} if fields.get("tie_word_embeddings") is None else {"tie_word_embeddings": fields["tie_word_embeddings"]}
    return ConfigFields(fields.name, {**defaults, **text, **tied, "model_type": fields["model_type"]})


def decoder_projections(cfg: ModelConfig, layer: str = TEXT) -> dict[str, Projection]:
    """Every matrix by the name that `transformer` uses. layer: what Hugging Face's names in a layer begin with."""
    queries, keys, layers = cfg.heads * cfg.head_dim, cfg.kv_heads * cfg.head_dim, (cfg.layers,)

    def attention(name: str, inputs: int, outputs: int) -> Projection:
        return Projection(f"{layer}self_attn.{name}_proj", inputs, outputs, "train_attn", layers)

    def mlp(name: str, inputs: int, outputs: int) -> Projection:
        if not cfg.experts:
            return Projection(f"{layer}mlp.{name}_proj", inputs, outputs, "train_mlp", layers)
        module, stack = f"{layer}mlp.experts.{{}}.{name}_proj", (cfg.layers, cfg.experts)
        return Projection(module, inputs, outputs, "train_mlp", stack, per_token=cfg.experts_per_token)

    unembed = Projection("lm_head", cfg.hidden, cfg.vocab, "train_unembed", ())
    if cfg.fused:
        return {
            "qkv": attention("qkv", cfg.hidden, queries + 2 * keys),
            "o": attention("o", queries, cfg.hidden),
            "gate_up": mlp("gate_up", cfg.hidden, 2 * cfg.mlp),
            "down": mlp("down", cfg.mlp, cfg.hidden),
            "unembed": unembed,
        }
    return {
        "q": attention("q", cfg.hidden, queries),
        "k": attention("k", cfg.hidden, keys),
        "v": attention("v", cfg.hidden, keys),
        "o": attention("o", queries, cfg.hidden),
        "gate": mlp("gate", cfg.hidden, cfg.mlp),
        "up": mlp("up", cfg.hidden, cfg.mlp),
        "down": mlp("down", cfg.mlp, cfg.hidden),
        "unembed": unembed,
    }


def decoder_tensors(
    cfg: ModelConfig, layer: str = TEXT, norms: Mapping[str, str] = PRE_NORMS
) -> dict[str, LayerTensor]:
    """Norms, biases and the router by the name that `transformer` uses.

    cfg: the model. layer: as in `decoder_projections`. norms: Hugging Face's name of each norm of width `hidden`.
    TypeError for a norm behind the experts, which `transformer` does not compute.
    """
    if cfg.experts and "mlp_out_norm" in norms:
        raise TypeError(f"{cfg.architecture}: mlp_out_norm behind experts is not computed by models/transformer.py")
    tensors = {name: LayerTensor(f"{layer}{module}.weight", (cfg.hidden,)) for name, module in norms.items()}
    if cfg.qk_norm_whole:
        sizes = {"q": cfg.heads * cfg.head_dim, "k": cfg.kv_heads * cfg.head_dim}
        tensors |= {
            f"{name}_norm": LayerTensor(f"{layer}self_attn.{name}_norm.weight", (size,)) for name, size in sizes.items()
        }
    if cfg.qk_norm:
        tensors |= {
            f"{name}_norm": LayerTensor(f"{layer}self_attn.{name}_norm.weight", (cfg.head_dim,)) for name in "qk"
        }
    if cfg.qkv_bias:
        heads = {"q": cfg.heads, "k": cfg.kv_heads, "v": cfg.kv_heads}
        for name, count in heads.items():
            size = count * cfg.head_dim
            tensors[f"{name}_bias"] = LayerTensor(f"{layer}self_attn.{name}_proj.bias", (size,), split=True)
    if cfg.experts:
        tensors["router"] = LayerTensor(f"{layer}mlp.gate.weight", (cfg.experts, cfg.hidden))
    return tensors


def rotary_share(fields: ConfigFields, usual: float) -> ConfigFields:
    """The fields with the share of a head that turns, `usual` where the file does not say, for `decoder_config`."""
    share = fields.rope.get("partial_rotary_factor") or fields.get("partial_rotary_factor") or usual
    return replace(fields, values={**fields.values, "partial_rotary_factor": share})


def read_ropes(fields: ConfigFields, head_dim: int, theta: float = 10_000.0) -> Mapping[str, Rope]:
    """The rotary embedding of each `layer_types`, or of all under the name "".

    fields: of `config.json`. transformers 5 writes rope_parameters, for all layers or by `layer_types`; earlier
    releases wrote rope_scaling beside rope_theta. head_dim: of a head. theta: where the file has none.
    """
    values = fields.rope
    own = {key: fields[key] for key in _ROPE_FIELDS if fields.get(key) is not None}

    def one(values: Mapping[str, Any]) -> Rope:
        return read_rope(
            values,
            theta=theta,
            head_dim=head_dim,
            max_positions=fields.size("max_position_embeddings"),
            error=fields.error,
        )

    by_type = bool(values) and all(isinstance(each, dict) for each in values.values())
    return {name: one(each) for name, each in values.items()} if by_type else {"": one({**values, **own})}
