"""Per-layer inputs of Gemma 3n and Gemma 4: besides hidden states, each layer receives its own input for every token.

Letters: B rows, T tokens, D hidden, V vocabulary, L layers, P width of a layer's input.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tinkerflow.backend.compute.models.layers.matrices import LayerTensor
from tinkerflow.backend.compute.models.layers.mlp import Activation, activated
from tinkerflow.backend.compute.models.layers.norms import RMSNorm

if TYPE_CHECKING:
    import jax

    from tinkerflow.backend.compute.models.layers.step import LayerStep


class LayerInputWeights(NamedTuple):
    """One layer's weights for adding its input."""

    input_gate: jax.Array  # [P, D]
    input_projection: jax.Array  # [D, P]
    input_norm: jax.Array  # [D]


@dataclass(frozen=True)
class LayerInput:
    """Computes the inputs of all layers, and adds a layer's input. hidden, width: D and P. norm: for both steps."""

    hidden: int
    width: int
    norm: RMSNorm
    activation: Activation = "gelu"

    def tensors(self) -> dict[str, LayerTensor]:
        """The tensors of each layer, by our names."""
        return {
            "input_gate": LayerTensor("per_layer_input_gate.weight", (self.width, self.hidden)),
            "input_projection": LayerTensor("per_layer_projection.weight", (self.hidden, self.width)),
            "input_norm": LayerTensor("post_per_layer_input_norm.weight", (self.hidden,)),
        }

    def model_tensors(self, vocab: int, layers: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """The tensors that compute all layers' inputs: Hugging Face's names without the model's prefix, and shapes."""
        every = layers * self.width
        return {
            "embed": ("embed_tokens_per_layer.weight", (vocab, every)),
            "projection": ("per_layer_model_projection.weight", (every, self.hidden)),
            "norm": ("per_layer_projection_norm.weight", (self.width,)),
        }

    def all_layers(self, weights: Mapping[str, jax.Array], tokens_BT: jax.Array, x_BTD: jax.Array) -> jax.Array:
        """The inputs of all layers for every token, [L, B, T, P] in the dtype of x_BTD.

        weights: the tensors of `model_tensors`. tokens_BT int32: token ids. x_BTD: their embeddings.
        """
        import jax.numpy as jnp

        from tinkerflow.backend.compute.kernels.matmul import matmul
        from tinkerflow.backend.compute.models.layers.embedding import rows_of

        shape = (*x_BTD.shape[:2], -1, self.width)
        embedded = rows_of(weights["embed"], tokens_BT) * jnp.asarray(self.width**0.5, x_BTD.dtype)
        projected = matmul(x_BTD, weights["projection"]) * jnp.asarray(self.hidden**-0.5, x_BTD.dtype)
        projected_BTLP = self.norm(projected.reshape(shape), weights["norm"])
        both_BTLP = projected_BTLP + embedded.reshape(shape)
        return jnp.moveaxis(both_BTLP * jnp.asarray(0.5**0.5, x_BTD.dtype), 2, 0)

    def add(self, step: LayerStep, x_BTD: jax.Array) -> jax.Array:
        """x_BTD with the layer's input added."""
        from tinkerflow.backend.compute.kernels.matmul import matmul

        assert step.layer_input_BTP is not None
        weights = step.weights(LayerInputWeights)
        gated_BTP = activated(self.activation, matmul(x_BTD, weights.input_gate)) * step.layer_input_BTP
        return x_BTD + self.norm(matmul(gated_BTP, weights.input_projection), weights.input_norm)
