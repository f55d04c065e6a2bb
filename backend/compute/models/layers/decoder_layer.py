"""A layer of a decoder: its parts, their order, and its computation.

Letters: B rows, T tokens, D hidden.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Protocol

from tinkerflow.backend.compute.models.layers.attention import Attention
from tinkerflow.backend.compute.models.layers.experts import Experts
from tinkerflow.backend.compute.models.layers.gated_deltanet import GatedDeltaNet
from tinkerflow.backend.compute.models.layers.latent_attention import LatentAttention
from tinkerflow.backend.compute.models.layers.layer_input import LayerInput
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor, Projection, plain_name
from tinkerflow.backend.compute.models.layers.norms import PRE_NORM, NormPlaces, RMSNorm
from tinkerflow.backend.compute.models.rope import Rope

if TYPE_CHECKING:
    import jax

    from tinkerflow.backend.compute.models.layers.step import LayerStep

Mixer = Attention | LatentAttention | GatedDeltaNet


class FeedForward(Protocol):
    """The second half of a layer, after attention: an MLP or experts. Hashable."""

    @property
    def mixture(self) -> Experts | None:
        """The experts, or None."""

    def projections(self) -> dict[str, Projection]:
        """The matrices, by our names."""

    def tensors(self) -> dict[str, LayerTensor]:
        """The other tensors, by our names."""

    def __call__(self, step: LayerStep, x_BTD: jax.Array, y_BTD: jax.Array) -> Iterator[jax.Array]:
        """The terms to add to x_BTD, one after the other. y_BTD: x_BTD after the norm."""


class LayerScalar(NamedTuple):
    """layer_scalar [1]: multiplies the layer's result."""

    layer_scalar: jax.Array


@dataclass(frozen=True)
class DecoderLayer:
    """One layer: x + attention(norm(x)), then x + feed_forward(norm(x)).

    Equal layers are computed in one loop, each with its own weights.

    attention: mixes tokens.
    feed_forward: works on each token independently.
    norm: normalizes hidden states.
    places: where the norm is applied.
    layer_input: adds the layer's own input; None = no such input.
    scaled: the result is multiplied by a scalar of the layer (Gemma 4).
    """

    attention: Mixer
    feed_forward: FeedForward
    norm: RMSNorm
    places: NormPlaces = PRE_NORM
    layer_input: LayerInput | None = None
    scaled: bool = False

    @property
    def attends(self) -> bool:
        """Whether the layer's attention, of any kind, uses keys and values."""
        return self.attention.attends

    @property
    def pool(self) -> str:
        """The pool of the KV cache, or of states, that this layer uses."""
        return self.attention.pool

    @property
    def window(self) -> int | None:
        """How many tokens a query sees, including its own; None = all earlier tokens."""
        return self.attention.window

    @property
    def shares(self) -> int | None:
        """The number of an earlier layer of the same pool, with the keys and values that this layer reads."""
        return self.attention.shares

    @property
    def rope(self) -> Rope | None:
        """The rotary embedding; None = positions are not encoded."""
        return self.attention.rope

    def for_context(self, context: int) -> DecoderLayer:
        """The layer for sequences of up to `context` tokens."""
        return replace(self, attention=self.attention.for_context(context))

    def projections(self) -> dict[str, Projection]:
        return {**self.attention.projections(), **self.feed_forward.projections()}

    def tensors(self) -> dict[str, LayerTensor]:
        """The layer's norms, biases, routers and so on, by our names."""
        hidden = self.attention.hidden
        norms = {
            "attn_norm": self.places.before_attention,
            "attn_out_norm": self.places.after_attention,
            "mlp_norm": self.places.before_mlp,
            "mlp_out_norm": self.places.after_mlp,
        }
        tensors = {name: LayerTensor(f"{module}.weight", (hidden,)) for name, module in norms.items() if module}
        tensors |= {**self.attention.tensors(), **self.feed_forward.tensors()}
        if self.layer_input is not None:
            tensors |= self.layer_input.tensors()
        if self.scaled:
            tensors["layer_scalar"] = LayerTensor("layer_scalar", (1,), frozen=True)
        return tensors

    def __call__(self, step: LayerStep, x_BTD: jax.Array) -> jax.Array:
        """The layer's hidden states, [B, T, D] in the dtype of the weights. x_BTD: the previous layer's result."""
        step = step.of_layer({plain_name(name): matrix for name, matrix in self.projections().items()})
        mixed = self.attention.mix(step, x_BTD, self.norm)

        def after_mixing(
            x_BTD: jax.Array, mixed: jax.Array, given_BTk: jax.Array | None
        ) -> tuple[jax.Array, jax.Array | None]:
            routing = None if step.routing is None else replace(step.routing, given_BTk=given_BTk)  # of these tokens
            o_BTD = self.attention.output(step, mixed.reshape(*x_BTD.shape[:2], -1))
            x_BTD = x_BTD + step.norm(self.norm, "attn_out_norm", o_BTD)
            y_BTD = step.norm(self.norm, "mlp_norm", x_BTD)
            for term_BTD in self.feed_forward(replace(step, routing=routing), x_BTD, y_BTD):
                x_BTD = x_BTD + step.norm(self.norm, "mlp_out_norm", term_BTD)
            return x_BTD, None if routing is None else routing.own_BTk

        given_BTk = None if step.routing is None else step.routing.given_BTk
        x_BTD, own_BTk = step.by_token(after_mixing, x_BTD, mixed, given_BTk)
        if step.routing is not None:
            step.routing.own_BTk = own_BTk
        if self.layer_input is not None:
            x_BTD = self.layer_input.add(step, x_BTD)
        return x_BTD * step.weights(LayerScalar).layer_scalar if self.scaled else x_BTD
