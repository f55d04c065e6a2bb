"""What a base model is made of, and how the JSON files of its folder are read. No JAX, for the API and the engine."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from tinkerflow.backend.compute.models.rope import Rope, Scaling
from tinkerflow.backend.core.errors import UserError

ATTENTION, GLOBAL = "attention", "global"  # mixers: attention, and that with `ModelConfig.global_heads`


@dataclass(frozen=True)
class LayerKind:
    """How some layers of a model differ from others.

    rope: their rotary embedding; None = they do not know positions. window: how many tokens a query sees, itself
    included; None = all earlier ones. mixer: what mixes tokens. Layers with the same mixer have the same matrices for
    it. dense: the layer has an MLP of the width `dense_mlp`, in a model with experts in their place. shares: the number
    of an earlier layer with the same mixer, whose keys and values this one reads; it has none of its own.
    """

    rope: Rope | None
    window: int | None = None
    mixer: str = ATTENTION
    dense: bool = False
    shares: int | None = None

    @property
    def attends(self) -> bool:
        """Whether it has attention, of any kind."""
        return self.mixer in (ATTENTION, GLOBAL)


@dataclass(frozen=True)
class Heads:
    """The heads of attention: how many of keys and values there are, and the dimensions of each, as of queries.

    values: False = there is no projection for values; that of keys is theirs, too.
    """

    kv_heads: int
    head_dim: int
    values: bool = True


@dataclass(frozen=True)
class DeltaNet:
    """The shape of gated DeltaNet layers (`deltanet`).

    key_heads divide value_heads. taps: of the convolution. fused: the weights of q, k, v and z are one matrix, and so
    are those of b and a (Qwen3-Next).
    """

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    fused: bool

    @property
    def channels(self) -> int:
        """Queries, keys and values side by side: what goes through the convolution."""
        return 2 * self.key_heads * self.key_dim + self.values

    @property
    def values(self) -> int:
        """The values of all heads side by side."""
        return self.value_heads * self.value_dim


@dataclass(frozen=True)
class Vision:
    """The shape of the tower that sees images (`vision`), and how the text model takes what it saw.

    layers, hidden, heads, mlp: of its blocks. patch: the side of a patch, in pixels. frames: how many times a patch is
    seen, as a film that stands still. merge: merge * merge patches become one token. grid: the side of the square of
    learned positions. deep: the numbers of the blocks whose outputs are added behind the first layers of the text model
    (DeepStack), one each. token: the id of the placeholder. sections: how many pairs of a head's dimensions turn with
    time, rows and columns.
    """

    layers: int
    hidden: int
    heads: int
    mlp: int
    patch: int
    frames: int
    merge: int
    grid: int
    deep: tuple[int, ...]
    token: int
    sections: tuple[int, int, int]

    @property
    def vectors(self) -> int:
        """How many vectors the text model takes for each token of an image."""
        return 1 + len(self.deep)

    @property
    def token_side(self) -> int:
        """The side of the square that one token stands for, in pixels."""
        return self.patch * self.merge

    def turns_with(self, pair: int) -> int:
        """What a pair of a head's dimensions turns with: 0 time, 1 rows, 2 columns (interleaved M-RoPE)."""
        axis = pair % 3
        return axis if pair < 3 * self.sections[axis] else 0


@dataclass(frozen=True)
class Latent:
    """The shape of multi-head latent attention (`latent`).

    rank: the width of a token's latent, which keys and values are made of. query_rank: of that of queries; 0 = queries
    are made of the hidden states. plain and rotary: how many dimensions of a head of q and k stay, and how many turn.
    values: the dimensions of a head of v. interleaved: the two of a pair that turns lie side by side. norm_eps: of the
    norms on both latents, whatever the model's other norms have.
    """

    rank: int
    query_rank: int
    plain: int
    rotary: int
    values: int
    interleaved: bool
    norm_eps: float = 1e-6

    @property
    def cell(self) -> int:
        """What is kept of a token: its latent, and the part of a key that turns, for all heads."""
        return self.rank + self.rotary


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Hashable, so that it can be a static argument of jit.

    architecture: `model_type` of its family. `heads` * `head_dim` need not equal `hidden` (Qwen3). max_positions: the
    longest sequence in tokens. tied: the embedding is the unembedding, too. qk_norm: RMS norms on each head of q and k
    (Qwen3). qkv_bias: q, k and v have biases (Qwen2.5). experts: 0 in a dense model; else each token goes to
    `experts_per_token` of them (Qwen3-MoE), `mlp` is the width of one, and `norm_topk` makes their shares sum to 1.
    rotary_dims: how many of a head's dimensions turn, 0 = all. qk_norm_whole: RMS norms on all heads of q, and of k,
    together (OLMo 2). fused: one matrix for q, k and v, and one for gate and up (Phi-3). gelu: of the MLP, its tanh
    approximation in place of SiLU (Gemma). norm_plus_one: norms multiply by 1 + weight (Gemma). clamped: the bound of
    the experts' clamped SwiGLU, 0 = plain SwiGLU (gpt-oss). embed_scale: of embeddings. query_scale: of queries, beside
    1 / sqrt(head_dim). kinds: of every layer, if they are not all alike.
    gated: q has a second half for each head, a gate on what it has seen. shared_mlp: the width of an expert that every
    token goes to; 0 = none. delta: the shape of the layers with the mixer "delta". sigmoid: experts are scored by
    sigmoids, and a correction of each takes part in choosing (`experts.route`); of their `router_groups` groups a token
    goes to `groups_per_token`, and its shares are multiplied by `router_scale` (DeepSeek V3). dense_mlp: the width of
    the MLP in layers that are `dense`. latent: the shape of latent attention, in place of q, k and v; `head_dim` is
    then that of q and k. vision: what sees images; None = the model takes
    text. global_heads: of attention in layers with the mixer "global", which has matrices of its own; None = there are
    none. v_norm: RMS norms without weights on each head of v. unscaled: scores are not divided by sqrt(head_dim).
    layer_input: the width of what every layer is given of each token beside hidden states
    (`transformer.layer_inputs`); 0 = nothing. softcap: logits z become softcap * tanh(z / softcap); 0 = they stay
    (Gemma 4).
    """

    architecture: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    mlp: int
    norm_eps: float
    rope_theta: float
    rope_scaling: Scaling | None
    max_positions: int
    tied: bool
    qk_norm: bool = False
    qkv_bias: bool = False
    experts: int = 0
    experts_per_token: int = 0
    norm_topk: bool = False
    rotary_dims: int = 0
    qk_norm_whole: bool = False
    fused: bool = False
    gelu: bool = False
    norm_plus_one: bool = False
    clamped: float = 0.0
    embed_scale: float = 1.0
    query_scale: float = 1.0
    kinds: tuple[LayerKind, ...] = ()
    gated: bool = False
    shared_mlp: int = 0
    delta: DeltaNet | None = None
    vision: Vision | None = None
    sigmoid: bool = False
    router_groups: int = 1
    groups_per_token: int = 1
    router_scale: float = 1.0
    dense_mlp: int = 0
    latent: Latent | None = None
    global_heads: Heads | None = None
    v_norm: bool = False
    unscaled: bool = False
    layer_input: int = 0
    softcap: float = 0.0

    @property
    def rope(self) -> Rope:
        """The rotary embedding of the layers, unless `kinds` has others."""
        return Rope(self.rope_theta, self.rotary_dims or self.head_dim, self.rope_scaling)

    @property
    def value_dim(self) -> int:
        """The dimensions of a head of v."""
        return self.latent.values if self.latent else self.head_dim

    def heads_of(self, mixer: str) -> Heads:
        """The heads of attention in the layers that have this mixer."""
        own = self.global_heads if mixer == GLOBAL else None
        return own or Heads(self.kv_heads, self.head_dim)

    def cached(self, mixer: str = ATTENTION) -> tuple[int, int, int]:
        """What a layer's attention keeps of a token: how many heads, and the widths of a key and of a value.

        Values of a latent are a part of its one key: they have no room of their own.
        """
        own = self.heads_of(mixer)
        return (1, self.latent.cell, 0) if self.latent else (own.kv_heads, own.head_dim, own.head_dim)

    @property
    def split_heads(self) -> int:
        """What divides the number of key-value heads of every layer: over so many devices they can be split."""
        return math.gcd(*(self.cached(mixer)[0] for mixer in (ATTENTION, GLOBAL) if self.numbers(mixer)))

    @property
    def cached_cell(self) -> int:
        """How many numbers the attention of all layers keeps of a token."""
        cells = ((len(self.numbers(mixer)), *self.cached(mixer)) for mixer in (ATTENTION, GLOBAL))
        return sum(layers * heads * (key + value) for layers, heads, key, value in cells)

    def widths(self, kind: LayerKind) -> tuple[int, int]:
        """The dimensions of a head of q and k, and of v, in a layer with attention."""
        key = self.heads_of(kind.mixer).head_dim
        return key, self.value_dim if self.latent else key

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """The kind of every layer."""
        return self.kinds or (LayerKind(self.rope),) * self.layers

    def numbers(self, mixer: str) -> tuple[int, ...]:
        """The numbers of the layers that have this mixer, but of those that share keys and values of others."""
        kinds = enumerate(self.layer_kinds)
        return tuple(number for number, kind in kinds if kind.mixer == mixer and kind.shares is None)

    def place(self, number: int) -> int:
        """Where among the layers with its mixer is what this layer keeps of tokens, or reads of the one it shares."""
        kind = self.layer_kinds[number]
        return self.numbers(kind.mixer).index(number if kind.shares is None else kind.shares)

    def for_context(self, context: int) -> ModelConfig:
        """The config for a service whose sequences have up to `context` tokens (`Rope.for_context`)."""

        def changed(rope: Rope) -> Rope:
            return rope.for_context(min(context, self.max_positions))

        kinds = tuple(replace(kind, rope=kind.rope and changed(kind.rope)) for kind in self.kinds)
        return replace(self, rope_scaling=changed(self.rope).scaling, kinds=kinds)


@dataclass(frozen=True)
class ConfigFields:
    """The fields of a Hugging Face `config.json`. Errors call the model `name`."""

    name: str
    values: Mapping[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A field; `default` when it is absent."""
        return self.values.get(key, default)

    def __getitem__(self, key: str) -> Any:
        """A field; UserError when it is absent."""
        if key not in self.values:
            raise self.error(f"config.json has no field {key!r}")
        return self.values[key]

    def size(self, key: str, default: int | None = None) -> int:
        """A field that is a positive whole number; `default` when it is absent or null. UserError for anything else."""
        value = self[key] if default is None else self.get(key) or default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise self.error(f"{key} is {value!r} in config.json; it must be a positive whole number")
        return value

    def inner(self, key: str) -> ConfigFields:
        """The fields of an object that a field holds; UserError when it is absent or holds something else."""
        value = self[key]
        if not isinstance(value, dict):
            raise self.error(f"{key} is {value!r} in config.json; it must be an object")
        return replace(self, values=value)

    @property
    def rope(self) -> Any:
        """What the file says of rotary embeddings beside their theta: transformers 4 and 5 name it differently."""
        return self.get("rope_parameters") or self.get("rope_scaling") or {}

    def chosen_experts(self, experts: int, key: str = "num_experts_per_tok") -> int:
        """How many of a layer's experts each token goes to, by the field `key`; UserError: not 1 to their number."""
        chosen = self.size(key)
        if chosen > experts:
            raise self.error(f"{key} {chosen} of {experts} experts; must be from 1 to their number")
        return chosen

    def refuse_others(self, **supported: Any) -> None:
        """UserError when a field is present, not null, and has another value than the one supported."""
        for key, value in supported.items():
            if self.get(key) not in (None, value):
                raise self.error(f"{key} {self[key]!r} is not supported; it must be {value!r}")

    def error(self, text: str) -> UserError:
        """An error about this model."""
        return UserError(f"base model {self.name!r}: {text}")
