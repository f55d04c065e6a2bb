"""The shape of a base model, for planning and computing. No JAX, because the API and the engine import this file."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from tinkerflow.backend.compute.models.layers import (
    ATTENTION,
    GLOBAL,
    Attention,
    DecoderLayer,
    Experts,
    GatedDeltaNet,
    LatentAttention,
    LayerInput,
    RMSNorm,
)
from tinkerflow.backend.compute.models.rope import Rope


@dataclass(frozen=True)
class Vision:
    """The shape of a vision tower (`vision_tower`), and the places of its features in the text model.

    layers: the number of blocks. hidden, heads, mlp: the sizes of each block.
    patch: the side of a patch, in pixels.
    frames: how many times a patch is repeated, as in a video without motion.
    merge: merge * merge patches become one token.
    grid: the side of the square of learned positions.
    deep: the numbers of blocks with outputs that are added after the first layers of the text model, one output for
    each layer (DeepStack, arXiv 2406.04334).
    token: the id of the placeholder token.
    sections: how many pairs of a head's dimensions rotate with time, rows and columns.
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
        """The side of the square of pixels that one token covers."""
        return self.patch * self.merge

    def rotated_by(self, pair: int) -> int:
        """The position that rotates a pair of dimensions: 0 time, 1 row, 2 column (interleaved M-RoPE)."""
        axis = pair % 3
        return axis if pair < 3 * self.sections[axis] else 0


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a decoder-only transformer. Hashable, so that it can be a static argument of jit.

    architecture: the family's `model_type`.
    vocab, hidden: the sizes of the vocabulary and of hidden states.
    decoder_layers: all layers, in order.
    norm: normalizes the last layer's result.
    max_positions: the longest sequence in tokens.
    tied: whether the embedding is also the unembedding.
    embed_scale: multiplies embeddings.
    softcap: logits z become softcap * tanh(z / softcap); 0 = no change (Gemma 4).
    vision: the vision tower; None = the model takes text only.
    """

    architecture: str
    vocab: int
    hidden: int
    decoder_layers: tuple[DecoderLayer, ...]
    norm: RMSNorm
    max_positions: int
    tied: bool
    embed_scale: float = 1.0
    softcap: float = 0.0
    vision: Vision | None = None

    def __hash__(self) -> int:
        """The hash, computed only once because every call of a jitted function needs the hash."""
        return self._hash

    @cached_property
    def _hash(self) -> int:
        return hash((self.architecture, self.vocab, self.hidden, self.decoder_layers, self.max_positions, self.tied))

    @property
    def layers(self) -> int:
        """How many layers there are."""
        return len(self.decoder_layers)

    @property
    def attentions(self) -> list[Attention | LatentAttention]:
        """The attention of every layer that has keys and values, in order."""
        mixers = (layer.attention for layer in self.decoder_layers)
        return [mixer for mixer in mixers if not isinstance(mixer, GatedDeltaNet)]

    @property
    def heads(self) -> int:
        """The number of query heads of every layer with attention."""
        return self.attentions[0].heads

    @property
    def latent(self) -> LatentAttention | None:
        """The latent attention of every layer; None in models without it."""
        first = self.attentions[0]
        return first if isinstance(first, LatentAttention) else None

    @property
    def delta(self) -> GatedDeltaNet | None:
        """The layers with linear attention; None in models without them."""
        mixers = (layer.attention for layer in self.decoder_layers)
        return next((mixer for mixer in mixers if isinstance(mixer, GatedDeltaNet)), None)

    @property
    def mixture(self) -> Experts | None:
        """The experts of the layers that have experts; None in a dense model."""
        mixtures = (layer.feed_forward.mixture for layer in self.decoder_layers)
        return next((mixture for mixture in mixtures if mixture is not None), None)

    @property
    def experts(self) -> int:
        """How many experts a layer has; 0 in a dense model."""
        return self.mixture.count if self.mixture else 0

    @property
    def experts_per_token(self) -> int:
        """How many experts each token goes to; 0 in a dense model."""
        return self.mixture.per_token if self.mixture else 0

    @property
    def layer_input(self) -> LayerInput | None:
        """The inputs of every layer besides hidden states; None in most models."""
        return self.decoder_layers[0].layer_input

    @property
    def ropes(self) -> tuple[Rope, ...]:
        """The model's rotary embeddings, each once."""
        return tuple(dict.fromkeys(layer.rope for layer in self.decoder_layers if layer.rope))

    def attention_of(self, pool: str) -> Attention | LatentAttention:
        """The attention of the layers in this pool of the KV cache."""
        return next(attention for attention in self.attentions if attention.pool == pool)

    @property
    def pools(self) -> tuple[str, ...]:
        """The pools of the KV cache."""
        return tuple(pool for pool in (ATTENTION, GLOBAL) if self.numbers(pool))

    @property
    def split_heads(self) -> int:
        """The greatest number of devices over which the key-value heads of every layer can be split evenly."""
        return math.gcd(*(self.attention_of(pool).cached[0] for pool in self.pools))

    @property
    def cached_cell(self) -> int:
        """How many numbers the attention of all layers caches for each token."""
        cells = ((len(self.numbers(pool)), *self.attention_of(pool).cached) for pool in self.pools)
        return sum(layers * heads * (key + value) for layers, heads, key, value in cells)

    def numbers(self, pool: str) -> tuple[int, ...]:
        """The numbers of the layers that write to this pool. Layers that read another layer's cache do not write."""
        layers = enumerate(self.decoder_layers)
        return tuple(number for number, layer in layers if layer.pool == pool and layer.shares is None)

    def place(self, number: int) -> int:
        """The place in the pool of a layer, or of the layer with the keys and values that it reads."""
        layer = self.decoder_layers[number]
        return self.numbers(layer.pool).index(number if layer.shares is None else layer.shares)

    def for_context(self, context: int) -> ModelConfig:
        """The config for sequences of up to `context` tokens: LongRoPE's frequencies depend on it."""
        most = min(context, self.max_positions)
        return replace(self, decoder_layers=tuple(layer.for_context(most) for layer in self.decoder_layers))
