"""The inputs of a layer besides hidden states: weights, adapters, and functions that mix tokens.

Letters: B rows, T tokens, D hidden, H query heads, G key-value heads, d head dimension, C channels of a convolution.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol, TypeVar, cast

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from tinkerflow.backend.compute.kernels.adapter_gpu import UpdateInPlace, Updates, adapted_products
from tinkerflow.backend.compute.kernels.matmul import OfLayer, matmuls, own_matrix
from tinkerflow.backend.compute.kernels.split import split_products
from tinkerflow.backend.compute.mesh import EXPERT, FSDP, expert_axes, row_parts
from tinkerflow.backend.compute.models.layers.matrices import Projection
from tinkerflow.backend.compute.models.layers.norms import RMSNorm
from tinkerflow.backend.compute.models.long_rows import gather_matrices, in_chunks
from tinkerflow.backend.compute.models.lora import LoraApply, LoraPair
from tinkerflow.backend.compute.models.rope import Rope
from tinkerflow.backend.compute.models.rotary import CosSin
from tinkerflow.backend.compute.weights.quantized import Weight

RopeTables = Mapping[Rope, tuple[CosSin, CosSin]]  # for queries, and for keys
Weights = TypeVar("Weights")
SPARE_ROWS = 4  # if devices send each other tokens, each computes 1/4 more rows at once than it gets on average

# delta_rule(weights, qkv_BTC, decay_BTH, beta_BTH) -> o_BTHv: gated DeltaNet's recurrence over the tokens. The
# function keeps the state. weights: the layer's `DeltaRuleWeights`.
DeltaRuleFn = Callable[[Any, jax.Array, jax.Array, jax.Array], jax.Array]


class AttentionFn(Protocol):
    """attend(q_BTHd, k_BTGd, v_BTGd, window=…, sinks_H=…) -> o_BTHd: softmax(q k / sqrt(d)) v over the visible tokens.

    q and k are rotated. k and v: None in a layer that reads the keys and values of an earlier layer.
    window: how many tokens a query sees, including its own; None = all earlier tokens.
    sinks_H: each head's score in the softmax that has no value; None = no sinks.
    """

    def __call__(
        self,
        q: jax.Array,
        k: jax.Array | None,
        v: jax.Array | None,
        /,
        *,
        window: int | None,
        sinks_H: jax.Array | None,
    ) -> jax.Array:
        """The attended values, [B, T, H, d]."""


class LatentAttentionFn(Protocol):
    """attend(q_BTHp, q_BTHr, c_BTc, k_BTr, kv_b, pair) -> o_BTHv: latent attention without the heads' keys and values.

    q_BTHp, q_BTHr: the unrotated and rotated parts of queries. c_BTc: latents. k_BTr: the rotated part of keys.
    kv_b: the matrix that makes keys and values from latents. pair: the adapter's pair for it.
    """

    def __call__(
        self,
        plain: jax.Array,
        rotated: jax.Array,
        latents: jax.Array,
        keys: jax.Array,
        kv_b: Weight,
        pair: LoraPair | None,
        /,
    ) -> jax.Array:
        """The attended values, [B, T, H, v]."""


@dataclass(frozen=True)
class Mixers:
    """The functions that mix tokens, in training or over a cache. They store keys, values and states.

    attend: attention.
    delta_rule: gated DeltaNet's recurrence; None in models without it.
    attend_latents: latent attention over latents alone. None = the layer computes the keys and values of all heads for
    `attend`.
    recompute_heads: a backward pass that recomputes a layer computes queries, keys and values twice, so that they take
    no memory while the MLP is differentiated. This is not possible if layers share keys and values.
    """

    attend: AttentionFn
    delta_rule: DeltaRuleFn | None = None
    attend_latents: LatentAttentionFn | None = None
    recompute_heads: bool = False


class Linear(NamedTuple):
    """A layer's matrix, with its bias and the adapter's pair, if there are any. name: our name."""

    name: str
    weight: Weight | OfLayer
    bias: jax.Array | None
    pair: LoraPair | None


@dataclass
class Routing:
    """The experts of one layer's tokens.

    given_BTk int32: the given experts, which replace the router's choice; -1 = none for the token; None = none for any
    token. own_BTk int32: the router's choice, which a layer with experts sets.
    """

    given_BTk: jax.Array | None = None
    own_BTk: jax.Array | None = None

    def replayed(self, own_BTk: jax.Array) -> jax.Array:
        """The experts that compute the tokens. own_BTk: the router's choice, which is stored."""
        self.own_BTk = own_BTk
        return own_BTk if self.given_BTk is None else jnp.where(self.given_BTk >= 0, self.given_BTk, own_BTk)


@dataclass(frozen=True)
class LayerStep:
    """One layer's weights, and all other inputs of its computation besides hidden states.

    mesh: experts and rows are split over it.
    tensors: the layer's weights by plain name: matrices, norms, biases.
    pairs: the adapter's pairs for these matrices; some or all may be missing.
    rope: cos and sin for each rotary embedding of the model.
    mixers: mix the tokens.
    lora_apply: computes the adapters' updates.
    layer_input_BTP: the layer's part of `LayerInput.all_layers`; None in models without it.
    tokens_at_once: how many tokens of each device go through matrices at a time, except around attention; 0 = all.
    matrices: maps plain names to the layer's declared matrices (`of_layer`).
    routing: replaces and records the experts of each token; None = neither.
    owners: the axes of the mesh that split the experts, as in `expert_dispatch.mixture`.
    updates_in_place: from `adapter_gpu.in_place`, if several devices read their parts of matrices in place.
    """

    mesh: Mesh
    tensors: Mapping[str, Any]
    pairs: Mapping[str, LoraPair]
    rope: RopeTables
    mixers: Mixers
    lora_apply: LoraApply
    layer_input_BTP: jax.Array | None = None
    tokens_at_once: int = 0
    matrices: Mapping[str, Projection] = field(default_factory=dict)
    routing: Routing | None = None
    owners: tuple[str, ...] = (EXPERT,)
    updates_in_place: UpdateInPlace | None = None

    def weights(self, kind: type[Weights], prefix: str = "") -> Weights:
        """The layer's weights for the fields of `kind`, a named tuple; None for weights that the layer lacks.

        prefix: precedes the names in the layer. Matrices are returned as `Linear`.
        """

        def find(name: str) -> Any:
            tensor = self.tensors.get(name)
            if tensor is None or name not in self.matrices:
                return tensor
            return Linear(name, tensor, self.tensors.get(f"{name}_bias"), self.pairs.get(name))

        return kind(*(find(f"{prefix}{field}") for field in cast(Any, kind)._fields))

    def project(self, x: jax.Array, *linears: Linear) -> tuple[jax.Array, ...]:
        """x times each of these matrices, plus the adapters' updates and the biases."""
        sums = self._sums(x, linears)
        named = [checkpoint_name(y, linear.name) for linear, y in zip(linears, sums, strict=True)]
        return tuple(y if linear.bias is None else y + linear.bias for linear, y in zip(linears, named, strict=True))

    def _sums(self, x: jax.Array, linears: Sequence[Linear]) -> Sequence[jax.Array]:
        weights: list[Weight | OfLayer] = [linear.weight for linear in linears]
        pairs = tuple(linear.pair for linear in linears if linear.pair is not None)
        if self.updates_in_place is not None:
            sums_inputs = self.matrices[linears[0].name].sums_inputs
            found = split_products(self.mesh, x, weights, pairs, self.updates_in_place, sums_inputs=sums_inputs)
            if found is not None:
                return found
            weights = [own_matrix(weight) for weight in weights]
        updates = self.lora_apply(x, pairs)
        if isinstance(updates, Updates) and len(updates) == len(linears):
            return adapted_products(x, weights, updates)
        rest, plain = iter(updates), matmuls(x, *weights)
        return [y if linear.pair is None else y + next(rest) for linear, y in zip(linears, plain, strict=True)]

    def norm(self, norm: RMSNorm, name: str, x: jax.Array) -> jax.Array:
        """x after the layer's norm `name`; x if the layer has no such norm."""
        return norm(x, self.tensors[name]) if name in self.tensors else x

    def by_token(self, part: Callable[..., Any], *arrays: Any, times: int = 1, own_buffers: bool = False) -> Any:
        """part(*arrays), which computes each token independently, for `times` * `tokens_at_once` tokens at a time.

        own_buffers: as in `in_chunks`.
        """
        if not self.tokens_at_once:
            return part(*arrays)
        return in_chunks(self.mesh, times * self.tokens_at_once, part, *arrays, own_buffers=own_buffers)

    def of_layer(self, matrices: Mapping[str, Projection]) -> LayerStep:
        """The step with the matrices that its layer declares.

        If tokens are computed in several parts, the matrices are gathered over fsdp only once.
        """
        tensors = self.tensors
        if self.tokens_at_once:
            own = {name: tensor for name, tensor in tensors.items() if name in matrices}
            experts = {name: tensor for name, tensor in own.items() if matrices[name].of_experts}
            tokens = self.tokens_at_once * row_parts(self.mesh)
            stay = experts and FSDP in training_expert_axes(self.mesh, tokens * matrices["gate"].inputs, experts)
            sums_inputs = {name: matrices[name].sums_inputs for name in own if not (stay and name in experts)}
            tensors = {**tensors, **gather_matrices(self.mesh, tensors, sums_inputs)}
        return replace(self, tensors=tensors, matrices=matrices)


def training_expert_axes(mesh: Mesh, numbers: int, experts: Mapping[str, Any]) -> tuple[str, ...]:
    """The axes that split a layer's experts in training, so that devices send each other the fewest bytes.

    Each device along the fsdp axis gathers either the experts or the tokens of all devices on this axis. numbers: the
    count of numbers in the hidden states of all tokens. experts: the matrices, which may be quantized or `OfLayer`.
    """
    leaves = jax.tree.leaves(jax.eval_shape(lambda weights: [*map(own_matrix, weights)], [*experts.values()]))
    exchanged = 2 * 4 * numbers  # a token and its result, in float32
    if mesh.shape[FSDP] == 1 or sum(leaf.size * leaf.dtype.itemsize for leaf in leaves) <= exchanged:
        return (EXPERT,)
    return expert_axes(mesh, leaves[0].shape[-3])
