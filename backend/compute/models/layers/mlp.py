"""The MLP of a layer: down(activation(gate(x)) * up(x)), which is SwiGLU or GeGLU (arXiv 2002.05202).

Letters: D hidden, F width, B rows, T tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor, Projection

if TYPE_CHECKING:
    import jax

    from tinkerflow.backend.compute.models.layers.step import LayerStep, Linear

Activation = Literal["silu", "gelu"]


class MLPWeights(NamedTuple):
    """gate and up [F, D], down [D, F]."""

    gate: Linear
    up: Linear
    down: Linear


class FusedMLPWeights(NamedTuple):
    """gate_up [2 * F, D], gate before up; down [D, F]."""

    gate_up: Linear
    down: Linear


@dataclass(frozen=True)
class MLP:
    """An MLP, applied to each token independently.

    hidden, width: D and F.
    activation: SiLU, or the tanh approximation of GELU.
    fused: gate and up are one matrix.
    prefix: precedes the names of the matrices, in layers with several MLPs or with an MLP that acts as experts.
    module: Hugging Face's name of the MLP.
    """

    hidden: int
    width: int
    activation: Activation = "silu"
    fused: bool = False
    prefix: str = ""
    module: str = "mlp"

    mixture = None  # a class attribute: there are no experts

    @classmethod
    def read(cls, fields: ConfigFields, *, activation: Activation = "silu", fused: bool = False) -> MLP:
        """The MLP of every layer. UserError: `hidden_act` is not SiLU, or there are biases."""
        refuse_other_mlps(fields)
        return cls(fields.size("hidden_size"), fields.size("intermediate_size"), activation, fused)

    def projections(self) -> dict[str, Projection]:
        """The MLP's matrices, by our names."""

        def matrix(name: str, inputs: int, outputs: int) -> Projection:
            return Projection(f"{self.module}.{name}_proj", inputs, outputs, "train_mlp")

        inner = {"gate_up": 2 * self.width} if self.fused else {"gate": self.width, "up": self.width}
        matrices = {f"{self.prefix}{name}": matrix(name, self.hidden, width) for name, width in inner.items()}
        down = Projection(
            f"{self.module}.down_proj", self.width, self.hidden, "train_mlp", sums_inputs=True, kept=False
        )
        return {**matrices, f"{self.prefix}down": down}

    def tensors(self) -> dict[str, LayerTensor]:
        """Empty: an MLP has no other tensors."""
        return {}

    def __call__(self, step: LayerStep, x_BTD: jax.Array, y_BTD: jax.Array) -> Iterator[jax.Array]:
        """The term that is added to x_BTD. y_BTD: x_BTD after the norm."""
        yield self.forward(step, y_BTD)

    def forward(self, step: LayerStep, y_BTD: jax.Array) -> jax.Array:
        """The MLP's result for y_BTD, [B, T, D]."""
        import jax.numpy as jnp

        if self.fused:
            fused = step.weights(FusedMLPWeights, self.prefix)
            gate_BTF, up_BTF = jnp.split(step.project(y_BTD, fused.gate_up)[0], 2, axis=-1)
            down = fused.down
        else:
            weights = step.weights(MLPWeights, self.prefix)
            gate_BTF, up_BTF = step.project(y_BTD, weights.gate, weights.up)
            down = weights.down
        return step.project(activated(self.activation, gate_BTF) * up_BTF, down)[0]


def refuse_other_mlps(fields: ConfigFields) -> None:
    """Check the config. UserError: the activation is not SiLU, or there are biases."""
    fields.refuse_others(hidden_act="silu", mlp_bias=False)


def activated(activation: Activation, x: jax.Array) -> jax.Array:
    """SiLU of x, or the tanh approximation of GELU."""
    import jax

    return jax.nn.gelu(x, approximate=True) if activation == "gelu" else jax.nn.silu(x)
