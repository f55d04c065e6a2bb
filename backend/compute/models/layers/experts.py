"""A mixture of experts instead of a layer's MLP: each token goes to the k experts that its router chooses.

`expert_dispatch` sends tokens to their experts across the devices of a mesh.

Letters: B rows, T tokens, D hidden, E experts, F width of an expert.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from tinkerflow.backend.compute.models.fields import ConfigFields
from tinkerflow.backend.compute.models.layers.matrices import LayerTensor, Projection
from tinkerflow.backend.compute.models.layers.mlp import MLP, Activation, activated, refuse_other_mlps
from tinkerflow.backend.compute.models.layers.routers import Router, SoftmaxRouter

if TYPE_CHECKING:
    import jax

    from tinkerflow.backend.compute.models.layers.step import LayerStep, Linear

EXPERT_MATRICES = ("gate", "up", "down")
SWIGLU_ALPHA = 1.702  # the gate's slope in clamped SwiGLU


class ExpertsWeights(NamedTuple):
    """Weights of a layer's experts. gate, up: [E, D, F], with biases [E, F]; down: [E, F, D], with biases [E, D]."""

    gate: Linear
    up: Linear
    down: Linear


class SharedExpertWeights(NamedTuple):
    """shared_router [1, D]: its sigmoid scales the shared expert's result; None = no scaling."""

    shared_router: jax.Array | None


@dataclass(frozen=True)
class Experts:
    """The experts of a layer, and the shared expert for all tokens.

    hidden, count, width: D, E and F.
    router: chooses the experts of each token.
    activation: applied to the gate.
    clamp: the bound of gpt-oss's clamped SwiGLU; 0 = plain SwiGLU or GeGLU.
    biases: each expert's matrices have biases.
    shared: an MLP for every token, or None.
    shared_gate: Hugging Face's name of the shared expert's own router; "" = no router.
    module: Hugging Face's name of a matrix, with `{}` for the expert.
    names: the names of gate, up and down after `module`, if they differ from gate_proj, up_proj and down_proj.
    """

    hidden: int
    count: int
    width: int
    router: Router
    activation: Activation = "silu"
    clamp: float = 0.0
    biases: bool = False
    shared: MLP | None = None
    shared_gate: str = ""
    module: str = "mlp.experts.{}."
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")

    @classmethod
    def read(cls, fields: ConfigFields, *, normalized: bool) -> Experts:
        """The experts of every layer, with a softmax router.

        normalized: whether shares sum to 1, if the file does not set it. UserError: a field is missing, or its value
        is not supported.
        """
        refuse_other_mlps(fields)
        fields.refuse_others(decoder_sparse_step=1, mlp_only_layers=[])
        # transformers 5 writes num_local_experts; earlier releases, and most of the hub, num_experts.
        key, other = "num_experts", "num_local_experts"
        if fields.get(key) is None and fields.get(other) is not None:
            key, other = other, key
        count = fields.size(key)
        fields.refuse_others(**{other: count})
        router = SoftmaxRouter(fields.chosen_experts(count), fields.flag("norm_topk_prob", normalized))
        return cls(fields.size("hidden_size"), count, fields.size("moe_intermediate_size"), router)

    @property
    def mixture(self) -> Experts:
        return self

    @property
    def per_token(self) -> int:
        """How many experts each token goes to."""
        return self.router.per_token

    def projections(self) -> dict[str, Projection]:
        """The matrices of the experts and of the shared expert, by our names."""

        def matrix(name: str, inputs: int, outputs: int, *, last: bool = False) -> Projection:
            module = self.module + self.names[EXPERT_MATRICES.index(name)]
            stack, times = (self.count,), self.per_token
            return Projection(module, inputs, outputs, "train_mlp", stack, times, sums_inputs=last, kept=not last)

        matrices = {name: matrix(name, self.hidden, self.width) for name in ("gate", "up")}
        matrices["down"] = matrix("down", self.width, self.hidden, last=True)
        return {**({} if self.shared is None else self.shared.projections()), **matrices}

    def tensors(self) -> dict[str, LayerTensor]:
        """The routers, and the experts' biases, by our names."""
        tensors = self.router.tensors(self.count, self.hidden)
        if self.shared_gate:
            tensors["shared_router"] = LayerTensor(f"{self.shared_gate}.weight", (1, self.hidden))
        if self.biases:
            widths = {"gate": self.width, "up": self.width, "down": self.hidden}
            module = self.module.replace(".{}", "")
            tensors |= {
                f"{name}_bias": LayerTensor(f"{module}{name}_proj.bias", (self.count, width))
                for name, width in widths.items()
            }
        return tensors

    def __call__(self, step: LayerStep, x_BTD: jax.Array, y_BTD: jax.Array) -> Iterator[jax.Array]:
        """The terms to add to x_BTD: the experts' term, then the shared expert's term.

        y_BTD: x_BTD after the norm.
        """
        import jax

        from tinkerflow.backend.compute.kernels.matmul import matmul

        yield self.forward(step, y_BTD, y_BTD)
        if self.shared is not None:
            shared_BTD = self.shared.forward(step, y_BTD)
            gate = step.weights(SharedExpertWeights).shared_router
            yield shared_BTD if gate is None else jax.nn.sigmoid(matmul(y_BTD, gate)) * shared_BTD

    def forward(self, step: LayerStep, y_BTD: jax.Array, routed_BTD: jax.Array) -> jax.Array:
        """The experts' results for y_BTD, summed by share, [B, T, D] in its dtype. routed_BTD: the router's input."""
        from tinkerflow.backend.compute.models.layers.expert_dispatch import mixture

        chosen_BTk, shares_BTk = self.router.route(step, routed_BTD)
        weights = step.weights(ExpertsWeights)
        return mixture(step.mesh, weights, self._gated, y_BTD, chosen_BTk, shares_BTk, step.lora_apply, step.owners)

    def _gated(self, gate_MF: jax.Array, up_MF: jax.Array) -> jax.Array:
        """SwiGLU or GeGLU. Clamping (gpt-oss) bounds gate and up, makes the gate steeper, and adds 1 to up."""
        import jax
        import jax.numpy as jnp

        if not self.clamp:
            return activated(self.activation, gate_MF) * up_MF
        # A value exactly at its bound, which is common in bfloat16, gets the whole slope, as in torch before 2.14.
        gate_MF = jnp.where(gate_MF > self.clamp, self.clamp, gate_MF)
        up_MF = jnp.where(jnp.abs(up_MF) > self.clamp, jnp.sign(up_MF) * self.clamp, up_MF)
        return gate_MF * jax.nn.sigmoid(SWIGLU_ALPHA * gate_MF) * (up_MF + 1)
